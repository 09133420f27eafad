"""Server-sent events, framed: one `data:` line an event; OpenAI's end by `[DONE]`, at a good end
only.
"""

from typing import Any

import msgspec
from pydantic import BaseModel

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream; charset=utf-8"

to_json = msgspec.json.Encoder().encode


def event(body: BaseModel) -> bytes:
    """Frame one JSON body; JSON has no raw line break, so one line is enough."""
    return b"data: " + body.model_dump_json().encode() + b"\n\n"


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """Frame one JSON body under the event's name, for APIs whose events have names."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(body) + b"\n\n"
