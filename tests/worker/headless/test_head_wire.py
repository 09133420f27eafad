"""Version of the line between a head and its headless engines, which may be of two releases."""

import hashlib
import json
from typing import Any

import msgspec

from pdcluster_worker.headless import VERSION, HeadHello, HeadReply
from pdcluster_worker.messages.engine import EngineInput, EngineOutput


def _without_words(schema: Any) -> Any:
    """A schema without its docstrings, which may change freely."""
    if isinstance(schema, dict):
        return {
            name: _without_words(part) for name, part in schema.items() if name != "description"
        }
    return [_without_words(part) for part in schema] if isinstance(schema, list | tuple) else schema


def test_a_change_of_the_messages_is_a_new_version() -> None:
    said = msgspec.json.schema_components([HeadHello, HeadReply, EngineInput, EngineOutput])
    text = json.dumps(_without_words(said), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    # Where the digest is another one, raise headless.VERSION, and put both here.
    assert (digest, VERSION) == ("32e9d66d3a1bed11", 16)
