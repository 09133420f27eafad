"""Answers of the Responses API: one response as JSON, or its typed events, numbered from 0."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import error_response, openai_error
from pdcluster_worker.server.generation.formatter import (
    Block,
    BlockEvent,
    BlockFormatter,
    Json,
    Usage,
    named_event,
)
from pdcluster_worker.server.openai.protocol import TokenNames, chat_logprobs
from pdcluster_worker.server.responses.schemas import Item, NamedTool, ResponsesRequest
from pdcluster_worker.server.text.events import Delta

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class ResponsesFormatter(BlockFormatter):
    """begun: the response without its output.  keep: takes the whole one."""

    def __init__(
        self, begun: Json, request_id: str, names: TokenNames, keep: Callable[[Json], None]
    ) -> None:
        super().__init__()
        self._begun = begun
        self._request_id = request_id
        self._names = names
        self._keep = keep
        self._unplaced: list[Json] = []  # logprobs of tokens whose text has yet to come
        self._unshown: list[Json] = []  # of tokens whose text comes with the next event
        self._num_events = 0

    def begin(self, usage: Usage) -> bytes:
        created = self._event("response.created", response=self._begun)
        return created + self._event("response.in_progress", response=self._begun)

    def end(self, usage: Usage) -> bytes:
        events = self._events(self._blocks.end())
        body = self._finished(usage)
        return events + self._event(f"response.{body['status']}", response=body)

    def failed(self, error: RequestError) -> bytes:
        shown = openai_error(error).error
        code = shown.code or "server_error"
        event = self._event("error", code=code, message=shown.message, param=shown.param)
        body = {
            **self._begun,
            "status": "failed",
            "error": {"code": code, "message": shown.message},
            "output": self._output("incomplete"),
        }
        return event + self._event("response.failed", response=body)

    def refused(self, error: RequestError) -> Response:
        return error_response(error, openai_error(error))

    def _take(self, delta: Delta) -> list[BlockEvent]:
        changes = super()._take(delta)
        self._unplaced += chat_logprobs(delta.scored, self._names)
        if changes:
            # those of tokens since the last change belong to the text that grew, if one did
            self._unshown, self._unplaced = self._unplaced, []
            for kind, block, _ in changes:
                if kind == "grew" and block.kind == "text":
                    block.logprobs += self._unshown
                    break
        return changes

    def _finished(self, usage: Usage) -> Json:
        status = "incomplete" if self._is_cut else "completed"
        body = {
            **self._begun,
            "status": status,
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "output": self._output(status),
            "usage": _usage(usage),
        }
        self._keep(body)
        return body

    @property
    def _is_cut(self) -> bool:
        return self._last is not None and self._last.finish_reason == "length"

    def _output(self, status: str) -> list[Json]:
        blocks = self._blocks.blocks
        return [
            self._item(block, status if block is blocks[-1] else "completed") for block in blocks
        ]

    def _item(self, block: Block, status: str) -> Json:
        """in_progress: as it begins, without its content."""
        is_whole = status != "in_progress"
        made: Json = {"id": self._item_id(block), "status": status}
        content = [_part(block)] if is_whole else []
        match block.kind:
            case "text":
                return made | {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                made |= {"type": "reasoning", "summary": [], "content": content}
                return made | {"encrypted_content": None}
            case "call":
                made |= {"type": "function_call", "call_id": block.call_id, "name": block.name}
                return made | {"arguments": block.text if is_whole else ""}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._request_id}{block.index}"

    def _change(self, change: BlockEvent) -> bytes:
        kind, block, text = change
        match kind:
            case "started":
                return self._started(block)
            case "grew":
                shown: Json = {"delta": text}
                if block.kind == "text":
                    shown["logprobs"], self._unshown = self._unshown, []
                return self._event(
                    f"response.{_EVENTS[block.kind]}.delta", **self._place(block), **shown
                )
            case "ended":
                return self._ended(block)

    def _started(self, block: Block) -> bytes:
        added = self._event(
            "response.output_item.added",
            output_index=block.index,
            item=self._item(block, "in_progress"),
        )
        if block.kind == "call":
            return added
        part = _part(Block(block.index, block.kind))
        return added + self._event("response.content_part.added", **self._place(block), part=part)

    def _ended(self, block: Block) -> bytes:
        name, place = f"response.{_EVENTS[block.kind]}.done", self._place(block)
        if block.kind == "call":
            done = self._event(name, **place, name=block.name, arguments=block.text)
        else:
            scores = {"logprobs": block.logprobs} if block.kind == "text" else {}
            done = self._event(name, **place, text=block.text, **scores)
            done += self._event("response.content_part.done", **place, part=_part(block))
        item = self._item(block, "incomplete" if self._is_cut else "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> Json:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})


def _part(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    text = {"type": "output_text", "text": block.text}
    return {**text, "annotations": [], "logprobs": block.logprobs}


def _usage(usage: Usage) -> Json:
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0 if details is None else details.reasoning_tokens
        },
        "total_tokens": usage.total_tokens,
    }


def response_of(request: ResponsesRequest, response_id: str, created_at: int) -> Json:
    """A response that has begun: what was asked for, and nothing made yet."""
    text = request.text
    form = None if text is None else text.format
    choice = request.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": {"type": "text"}
            if form is None
            else form.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice,
        "tools": [
            {"strict": None, "parameters": None, **tool.model_dump()}
            for tool in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
    }


def shown_items(items: Sequence[Item], request_id: str) -> list[Json]:
    return [_shown(item, f"{request_id}i{number}") for number, item in enumerate(items)]


def _shown(item: Item, own_id: str) -> Json:
    made: Json = item.model_dump(exclude_none=True)
    made["id"] = made.get("id") or f"{'msg' if made['type'] == 'message' else 'item'}_{own_id}"
    if made["type"] == "message" and isinstance(made["content"], str):
        kind = "output_text" if made["role"] == "assistant" else "input_text"
        made["content"] = [{"type": kind, "text": made["content"]}]
    return made | {"status": "completed"}
