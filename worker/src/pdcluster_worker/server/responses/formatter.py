"""Answers of the Responses API: one response as JSON, or its typed events, numbered from 0."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import error_response, openai_error
from pdcluster_worker.server.generation.blocks import (
    Block,
    BlockEnded,
    BlockGrew,
    BlockStarted,
    Change,
)
from pdcluster_worker.server.generation.formatter import BlockFormatter, Usage, named_event
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.logprobs import TokenNames
from pdcluster_worker.server.responses import protocol
from pdcluster_worker.server.responses.protocol import Json
from pdcluster_worker.server.text.events import Delta


@dataclass(frozen=True, slots=True)
class Begun:
    """body: without its output.  keep: takes the whole response."""

    body: Json
    request_id: str
    keep: Callable[[Json], None]
    names: TokenNames


class ResponsesFormatter(BlockFormatter):
    def __init__(self, begun: Begun) -> None:
        super().__init__()
        self._begun = begun
        self._logprobs: dict[int, list[Json]] = {}  # of the tokens of each text
        self._unplaced: list[Json] = []  # of tokens whose text has yet to come
        self._unshown: list[Json] = []  # of tokens whose text comes with the next event
        self._num_events = 0

    def begin(self, usage: Usage) -> bytes:
        body = self._begun.body
        created = self._event("response.created", response=body)
        return created + self._event("response.in_progress", response=body)

    def end(self, usage: Usage) -> bytes:
        events = self._events(self._blocks.end())
        body = self._finished(usage)
        return events + self._event(f"response.{body['status']}", response=body)

    def failed(self, error: RequestError) -> bytes:
        shown = openai_error(error).error
        code = shown.code or "server_error"
        event = self._event("error", code=code, message=shown.message, param=shown.param)
        why = {"code": code, "message": shown.message}
        body = {
            **self._begun.body,
            "status": "failed",
            "error": why,
            "output": self._output("incomplete"),
        }
        return event + self._event("response.failed", response=body)

    def refused(self, error: RequestError) -> Response:
        return error_response(error, openai_error(error))

    def _take(self, delta: Delta) -> list[Change]:
        changes = super()._take(delta)
        if delta.scored:
            self._unplaced += [
                protocol.logprob(entry)
                for entry in logprobs.for_chat(delta.scored, self._begun.names).content
            ]
        if changes:
            self._place_logprobs(changes)
        return changes

    def _place_logprobs(self, changes: list[Change]) -> None:
        """Those of tokens since the last change belong to the text that grew, if one did."""
        grown = next(
            (
                change.block
                for change in changes
                if isinstance(change, BlockGrew) and change.block.kind == "text"
            ),
            None,
        )
        self._unshown, self._unplaced = self._unplaced, []
        if grown is not None:
            self._logprobs.setdefault(grown.index, []).extend(self._unshown)

    def _finished(self, usage: Usage) -> Json:
        assert self._last is not None, "an answer has a token"
        is_cut = self._last.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        body = {
            **self._begun.body,
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output(status),
            "usage": protocol.usage_of(usage),
        }
        self._begun.keep(body)
        return body

    def _output(self, status: str) -> list[Json]:
        blocks = self._blocks.blocks
        return [
            self._item(block, status if block is blocks[-1] else "completed") for block in blocks
        ]

    def _item(self, block: Block, status: str) -> Json:
        return protocol.item(
            block, self._begun.request_id, status, self._logprobs.get(block.index, ())
        )

    # --- events -------------------------------------------------------------------------------

    def _change(self, change: Change) -> bytes:
        match change:
            case BlockStarted(block=block):
                return self._started(block)
            case BlockGrew(block=block, text=text):
                return self._grew(block, text)
            case BlockEnded(block=block):
                return self._ended(block)

    def _started(self, block: Block) -> bytes:
        added = self._event(
            "response.output_item.added",
            output_index=block.index,
            item=self._item(block, "in_progress"),
        )
        if block.kind == "call":
            return added
        part = protocol.part(block, is_empty=True)
        return added + self._event("response.content_part.added", **self._place(block), part=part)

    def _grew(self, block: Block, text: str) -> bytes:
        match block.kind:
            case "text":
                held_logprobs, self._unshown = self._unshown, []
                return self._event(
                    "response.output_text.delta",
                    **self._place(block),
                    delta=text,
                    logprobs=held_logprobs,
                )
            case "reasoning":
                return self._event(
                    "response.reasoning_text.delta", **self._place(block), delta=text
                )
            case "call":
                return self._event(
                    "response.function_call_arguments.delta", **self._item_place(block), delta=text
                )

    def _ended(self, block: Block) -> bytes:
        held_logprobs = self._logprobs.get(block.index, [])
        is_cut = self._last is not None and self._last.finish_reason == "length"
        item = self._item(block, "incomplete" if is_cut else "completed")
        match block.kind:
            case "text":
                whole = self._event(
                    "response.output_text.done",
                    **self._place(block),
                    text=block.text,
                    logprobs=held_logprobs,
                )
            case "reasoning":
                whole = self._event(
                    "response.reasoning_text.done", **self._place(block), text=block.text
                )
            case "call":
                name = "response.function_call_arguments.done"
                whole = self._event(
                    name, **self._item_place(block), name=block.name, arguments=block.text
                )
        if block.kind != "call":
            whole += self._event(
                "response.content_part.done",
                **self._place(block),
                part=protocol.part(block, held_logprobs),
            )
        return whole + self._event("response.output_item.done", output_index=block.index, item=item)

    def _item_place(self, block: Block) -> Json:
        return {
            "item_id": protocol.item_id(block, self._begun.request_id),
            "output_index": block.index,
        }

    def _place(self, block: Block) -> Json:
        return {**self._item_place(block), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})
