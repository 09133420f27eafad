"""Tables of requests in files of data, and the applications that they are sent to."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_worker.server.generation.chat_answer import ParserNames
from pdcluster_worker.server.text.chat_template import ChatTemplate
from pdcluster_worker.server.text.tokenizer import Tokenizer
from tests.worker.server.conftest import Rig, asgi_client, make_rig

OVERRIDES = PolicyConfig(
    allow_client_priority=True, decode_score=DecodeScoreSpec(allow_request_overrides=True)
)
THINKING = (
    "{% for m in messages %}{{ m.content }}{{ '<think>' + m.reasoning_content + '</think>' if "
    "m.reasoning_content }}\n{% endfor %}{% if add_generation_prompt %}assistant"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ reasoning_effort }}{% endif %}"
)


class Loader(yaml.SafeLoader):
    """With the tags for what is too long to write out."""


def construct_times(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
    times, value = loader.construct_sequence(node, deep=True)
    return value * times


def construct_members(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[str, Any]:
    number, value = loader.construct_sequence(node)
    return dict.fromkeys(map(str, range(number)), value)


def construct_nested(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[str, Any]:
    depth, name = loader.construct_sequence(node)
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {name: {"a": schema} if name == "properties" else schema}
    return schema


Loader.add_constructor("!times", construct_times)
Loader.add_constructor("!members", construct_members)
Loader.add_constructor("!nested", construct_nested)


def read_tables(path: Path) -> dict[str, Any]:
    tables: dict[str, Any] = yaml.load(path.read_text(), Loader)["tables"]  # noqa: S506 - a SafeLoader
    return tables


def rig_of(model: Path, scene: str | None) -> Rig:
    """An application by scene: `tools` with a template for them, `reasoning` with a parser too,
    `thinking` by a template that shows how; `overrides` with a policy that lets requests decide.
    """
    rig = make_rig(model)
    if scene == "overrides":
        rig.policy = OVERRIDES
    elif scene == "thinking":
        rig.tokenizer.chat_template = ChatTemplate(THINKING, {})
        rig.app = rig.make_app()
    elif scene is not None:
        rig.tokenizer = Tokenizer.load(model, "chatml-tools")
        rig.backend.max_model_len = 4000
        rig.policy = PolicyConfig()
        rig.app = rig.make_app(
            parsers=ParserNames(reasoning="qwen3" if scene == "reasoning" else "auto")
        )
    return rig


async def answers(rig: Rig, table: dict[str, Any]) -> AsyncIterator[tuple[str, httpx.Response]]:
    """Each row of a table, shortened, and the answer to it."""
    async with asgi_client(rig.app) as http:
        for fields in table["rows"]:
            reply = await http.post(
                table["path"],
                content=json.dumps(table["body"] | fields),
                headers={"content-type": "application/json"},
            )
            text = json.dumps(fields)
            yield text if len(text) < 200 else f"{text[:150]}... of {len(text)} characters", reply
