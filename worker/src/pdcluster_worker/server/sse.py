"""Server-sent events as OpenAI frames them: one `data:` line an event, `[DONE]` at a good end only."""

from pydantic import BaseModel

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream; charset=utf-8"


def event(body: BaseModel) -> bytes:
    """Frame one JSON body; JSON has no raw line break, so one line is enough."""
    return b"data: " + body.model_dump_json().encode() + b"\n\n"
