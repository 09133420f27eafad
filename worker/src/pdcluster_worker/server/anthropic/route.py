"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.anthropic.chat_request import NAMES, chat_of
from pdcluster_worker.server.anthropic.schemas import CountRequest, MessagesPrompt, MessagesRequest
from pdcluster_worker.server.errors import MESSAGES, MessagesError, error_response, messages_error
from pdcluster_worker.server.generation.formatter import (
    Block,
    BlockEvent,
    BlockFormatter,
    Json,
    Usage,
    named_event,
)
from pdcluster_worker.server.generation.front_end import Prepared
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.request_context import RequestContext, context_of
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.schemas.fields import is_sendable
from pdcluster_worker.server.schemas.requests import ChatRequest
from pdcluster_worker.server.tools.calls import object_of

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormatter(BlockFormatter):
    def __init__(self, message_id: str, model: str, request_id: str) -> None:
        super().__init__()
        self._message_id = message_id
        self._model = model
        self._request_id = request_id

    def begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=self._message(usage)) + _event("ping")

    def end(self, usage: Usage) -> bytes:
        events = self._events(self._blocks.end())
        ending = {"delta": self._ending(), "usage": _usage_of(usage), **self._own()}
        last = _event("message_delta", **ending)
        return events + last + _event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        return named_event("error", messages_error(error, self._request_id).model_dump())

    def refused(self, error: RequestError) -> Response:
        return error_response(error, messages_error(error, self._request_id))

    def _finished(self, usage: Usage) -> Json:
        content = [_whole(block) for block in self._blocks.blocks]
        return self._message(usage) | {"content": content} | self._ending() | self._own()

    def _own(self) -> Json:
        return {"pdcluster": {"degraded": self._lost}} if self._lost else {}

    def _message(self, usage: Usage) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage_of(usage),
        }

    def _ending(self) -> Json:
        # calls that the request named count as calls here too
        last, blocks = self._last, self._blocks.blocks
        assert last is not None, "an answer has a token"
        assert last.finish_reason is not None, "a choice ends by its last token"
        if last.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
        reason = last.finish_reason
        if reason == "stop" and blocks and blocks[-1].kind == "call":
            reason = "tool_calls"
        return {"stop_reason": _REASONS[reason], "stop_sequence": None}

    def _change(self, change: BlockEvent) -> bytes:
        block, index = change.block, change.block.index
        match change.kind:
            case "started":
                return _event("content_block_start", index=index, content_block=_started(block))
            case "grew":
                return _event("content_block_delta", index=index, delta=_added(block, change.text))
            case "ended":
                return _event("content_block_stop", index=index)


def _usage_of(usage: Usage) -> Json:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _started(block: Block) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            call_id = f"toolu_{block.call_id.removeprefix('call_')}"
            return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}


def _added(block: Block, text: str) -> Json:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _whole(block: Block) -> Json:
    # a call that was cut off, or that JSON cannot carry, has no input
    match block.kind:
        case "text":
            return _started(block) | {"text": block.text}
        case "reasoning":
            return _started(block) | {"thinking": block.text}
        case "call":
            value = object_of(block.text)
            is_whole = value is not None and is_sendable(value)
            return _started(block) | {"input": value if is_whole else {}}


def _event(name: str, **fields: object) -> bytes:
    return named_event(name, {"type": name, **fields})


COUNT_PATH = f"{MESSAGES}/count_tokens"


class TokenCount(BaseModel):
    """Answer of count_tokens."""

    input_tokens: int


def message_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await _answer(serving, body, context_of(request))

    async def count_tokens(body: CountRequest, request: Request) -> Response:
        _, prepared = await _prepared(serving, body, context_of(request))
        count = TokenCount(input_tokens=len(prepared.prompts[0]))
        return Response(count.model_dump_json(), media_type="application/json")

    message, count = with_errors(None, MessagesError), with_errors(TokenCount, MessagesError)
    return [
        JsonRoute(
            MESSAGES,
            MessagesRequest,
            messages,
            message,
            reader=reader,
            others=serving.others,
            streams=True,
        ),
        JsonRoute(
            COUNT_PATH, CountRequest, count_tokens, count, reader=reader, others=serving.others
        ),
    ]


async def _answer(
    serving: ServingContext, body: MessagesRequest, context: RequestContext
) -> Response:
    chat, prepared = await _prepared(serving, body, context)
    message_id = f"msg_{context.request_id}"
    formatter = MessagesFormatter(message_id, body.model, context.request_id)
    return respond(
        serving, chat, prepared, formatter, response_id=message_id, context=context, names=NAMES
    )


async def _prepared(
    serving: ServingContext, body: MessagesPrompt, context: RequestContext
) -> tuple[ChatRequest, Prepared]:
    num_bytes, reasons = context.num_body_bytes, serving.parsers.reasoning is not None
    chat = await off_loop(num_bytes, chat_of, body, reasons=reasons)
    with NAMES.in_errors():
        check_servable(chat, 1, serving)
        return chat, await serving.front_end.chat(serving, chat, num_bytes)
