"""Server-sent events as OpenAI frames them: one `data:` line an event, `[DONE]` at a good end only."""

from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import BaseModel

from pdcluster_worker.server.events import Delta, TextDelta

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream; charset=utf-8"

to_json = msgspec.json.Encoder().encode
_MARK = "0"


def event(body: BaseModel) -> bytes:
    """Frame one JSON body; JSON has no raw line break, so one line is enough."""
    return b"data: " + body.model_dump_json().encode() + b"\n\n"


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """Frame one JSON body under the event's name, for APIs whose events have names."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(body) + b"\n\n"


class Events:
    """The events of one answer.

    Most tokens add text and nothing else: the bytes around that text are those of
    the choice's first such event, so no body is built again.
    """

    def __init__(self, body_of: Callable[[Delta], BaseModel | None]) -> None:
        self._body_of = body_of
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index

    def of(self, delta: Delta) -> bytes | None:
        """The event of one delta; None when it shows nothing."""
        text = delta.plain_text
        if not text:
            body = self._body_of(delta)
            return None if body is None else event(body)
        around = self._around.get(delta.index)
        if around is None:
            around = self._around[delta.index] = self._split(delta.index)
        return around[0] + to_json(text) + around[1]

    def _split(self, index: int) -> tuple[bytes, bytes]:
        body = self._body_of(Delta(index, (TextDelta(_MARK),)))
        assert body is not None, "text shows"
        # What follows the text is written by us alone, so the last mark is the text's.
        before, _, after = event(body).rpartition(to_json(_MARK))
        return before, after
