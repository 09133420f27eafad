"""Answers of the Messages API as bytes: one message as JSON, or its events in their order."""

from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.anthropic import protocol
from pdcluster_worker.server.anthropic.protocol import Json
from pdcluster_worker.server.errors import anthropic as errors
from pdcluster_worker.server.generation.blocks import (
    BlockEnded,
    BlockGrew,
    Blocks,
    BlockStarted,
    Change,
)
from pdcluster_worker.server.generation.usage import Usage
from pdcluster_worker.server.http import sse
from pdcluster_worker.server.text.events import Delta


class MessagesWriter:
    """See `generation.response.Writer`."""

    def __init__(self, message_id: str, model: str, request_id: str) -> None:
        self._message_id = message_id
        self._model = model
        self._request_id = request_id
        self._blocks = Blocks()
        self._last: Delta | None = None

    def begin(self, usage: Usage) -> bytes:
        """See `Writer`."""
        message = protocol.message(self._message_id, self._model, usage)
        return _event("message_start", message=message) + _event("ping")

    def of(self, delta: Delta) -> bytes | None:
        """See `Writer`."""
        self._last = delta
        return self._events(self._blocks.feed(delta.parts))

    def end(self, usage: Usage) -> bytes:
        """See `Writer`."""
        events = self._events(self._blocks.end())
        last = _event("message_delta", delta=self._ending(), usage=protocol.usage_of(usage))
        return events + last + _event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        """See `Writer`."""
        return sse.named_event("error", errors.body(error, self._request_id))

    def whole(self, choices: list[list[Delta]], usage: Usage) -> bytes:
        """See `Writer`."""
        (deltas,) = choices
        for delta in deltas:
            self.of(delta)
        self._blocks.end()
        content = [protocol.whole(block) for block in self._blocks.blocks]
        message = protocol.message(self._message_id, self._model, usage) | {"content": content}
        return sse.to_json(message | self._ending())

    def refused(self, error: RequestError) -> Response:
        """See `Writer`."""
        return errors.response(error, self._request_id)

    def _ending(self) -> Json:
        assert self._last is not None, "an answer has a token"
        assert self._last.finish_reason is not None, (
            "a generation yields until every choice has ended"
        )
        return protocol.ending(
            self._last.finish_reason, self._last.stop_string, self._blocks.blocks
        )

    def _events(self, changes: list[Change]) -> bytes:
        return b"".join(_change(change) for change in changes)


def _change(change: Change) -> bytes:
    block = change.block
    match change:
        case BlockStarted():
            return _event(
                "content_block_start", index=block.index, content_block=protocol.started(block)
            )
        case BlockGrew(text=text):
            return _event(
                "content_block_delta", index=block.index, delta=protocol.added(block, text)
            )
        case BlockEnded():
            return _event("content_block_stop", index=block.index)


def _event(name: str, **fields: object) -> bytes:
    return sse.named_event(name, {"type": name, **fields})
