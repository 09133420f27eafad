"""POST /v1/responses, and what is done with the responses that are kept."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_schema.text import quoted
from pdcluster_worker.errors import CONTEXT_LENGTH_EXCEEDED, RequestError, field_error
from pdcluster_worker.server.generation.formatter import to_json
from pdcluster_worker.server.generation.front_end import Prepared
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.request_context import RequestContext, context_of
from pdcluster_worker.server.http.routes import ApiRoute, JsonRoute, with_errors
from pdcluster_worker.server.openai.protocol import TokenNames
from pdcluster_worker.server.responses.chat_request import NAMES, chat_of, items_of
from pdcluster_worker.server.responses.formatter import ResponsesFormatter, response_of, shown_items
from pdcluster_worker.server.responses.schemas import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ResponsesRequest,
)
from pdcluster_worker.server.schemas.requests import ChatRequest

MAX_RESPONSES = 4096
MAX_BYTES = 128 << 20
MAX_SECONDS = 24 * 3600.0

_WORKER_DIGITS = 8
_OBJECT_BYTES = 512
"""Bytes of memory that each object of a response or an item takes beside its JSON; measured."""


@dataclass(frozen=True, slots=True)
class Kept:
    """input: the request's items, as listed.  num_bytes: in memory, earlier turns included."""

    body: dict[str, Any]
    input: list[dict[str, Any]]
    conversation: tuple[Item, ...]
    num_bytes: int


def bytes_of(value: dict[str, Any] | list[dict[str, Any]]) -> int:
    """Memory taken, about: small items weigh more than their JSON."""
    text = to_json(value)
    return len(text) + _OBJECT_BYTES * text.count(b'{"')


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    kept: Kept
    owner: bytes
    at: float


@dataclass(slots=True)
class _Owned:
    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """owner: the digest of an API key, b"" where none is asked for.  clock: monotonic seconds."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._worker = uuid.uuid4().hex[:_WORKER_DIGITS]
        self._entries: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._owners: dict[bytes, _Owned] = {}
        self._num_bytes = 0

    def new_id(self, request_id: str) -> str:
        return f"resp_{self._worker}{request_id}"

    def put(self, response_id: str, owner: bytes, kept: Kept) -> None:
        """Keep a response; one that is larger than all that may be kept is not."""
        if kept.num_bytes > self._max_bytes:
            return
        self._entries[response_id] = _StoredResponse(kept, owner, self._clock())
        owned = self._owners.setdefault(owner, _Owned())
        owned.ids[response_id] = None
        owned.num_bytes += kept.num_bytes
        self._num_bytes += kept.num_bytes
        self._expire()

    def get(self, response_id: str, owner: bytes, param: str | None = None) -> Kept:
        """Raises RequestError naming where it may be: 404, or 400 with the field `param`."""
        self._expire()
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise self._missing(response_id, param)
        return entry.kept

    def delete(self, response_id: str, owner: bytes) -> None:
        """Those that went on from it stay.  Raises RequestError 404."""
        self.get(response_id, owner)
        self._drop(response_id)

    def _expire(self) -> None:
        oldest = self._clock() - self._max_seconds
        while self._entries and (first := next(iter(self._entries.items())))[1].at < oldest:
            self._drop(first[0])
        while len(self._entries) > self._max_responses:
            self._drop_of(max(self._owners.values(), key=lambda owned: len(owned.ids)))
        while self._num_bytes > self._max_bytes:
            self._drop_of(max(self._owners.values(), key=lambda owned: owned.num_bytes))

    def _drop_of(self, owned: _Owned) -> None:
        self._drop(next(iter(owned.ids)))

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        owned = self._owners[entry.owner]
        del owned.ids[response_id]
        owned.num_bytes -= entry.kept.num_bytes
        self._num_bytes -= entry.kept.num_bytes
        if not owned.ids:
            del self._owners[entry.owner]

    def _missing(self, response_id: str, param: str | None) -> RequestError:
        name = f"response {quoted(response_id)}"
        if response_id.startswith("resp_") and not response_id.startswith(self.new_id("")):
            why = (
                "was made by another worker, or before a restart: responses are kept in the "
                "memory of the worker that made them; send the whole conversation as input, or "
                "let one worker take all requests of a conversation (session affinity)"
            )
        else:
            why = (
                "is not kept here (any more): it was not stored, has expired or was deleted; send "
                "the whole conversation as input"
            )
        if param is None:
            return RequestError(f"{name} {why}", status=404, code="response_not_found")
        message, code = f"{param}: {name} {why}", "previous_response_not_found"
        return RequestError(message, param=param, code=code)


PATH = "/v1/responses"

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def response_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    """Responses are kept here."""
    store = ResponseStore(serving.clock)

    async def create(body: ResponsesRequest, request: Request) -> Response:
        return await _answer(serving, store, body, context_of(request))

    answers, path = with_errors(None), f"{PATH}/{{response_id}}"
    return [
        JsonRoute(
            PATH,
            ResponsesRequest,
            create,
            answers,
            reader=reader,
            others=serving.others,
            streams=True,
        ),
        *(
            ApiRoute(f"{path}{end}", partial(handle, store), answers, method=method)
            for end, handle, method in (
                ("", retrieve, "GET"),
                ("/input_items", input_items, "GET"),
                ("", delete, "DELETE"),
                ("/cancel", cancel, "POST"),
            )
        ),
    ]


def _kept(store: ResponseStore, request: Request) -> Kept:
    return store.get(request.path_params["response_id"], context_of(request).key_digest)


async def retrieve(store: ResponseStore, request: Request) -> Response:
    if request.query_params.get("stream", "").lower() in ("1", "true"):
        raise field_error("stream", "a response that is kept is not streamed again: leave it out")
    return _json(_kept(store, request).body)


async def input_items(store: ResponseStore, request: Request) -> Response:
    items = _kept(store, request).input
    ids = [item["id"] for item in items]
    return _json(
        {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
    )


async def delete(store: ResponseStore, request: Request) -> Response:
    response_id = request.path_params["response_id"]
    store.delete(response_id, context_of(request).key_digest)
    return _json({"id": response_id, "object": "response", "deleted": True})


async def cancel(store: ResponseStore, request: Request) -> Response:
    _kept(store, request)
    raise RequestError(
        "a response is made while its client waits: close the connection to cancel it",
        code="not_in_background",
    )


def _json(body: dict[str, Any]) -> Response:
    return Response(to_json(body), media_type="application/json")


async def _answer(
    serving: ServingContext, store: ResponseStore, body: ResponsesRequest, context: RequestContext
) -> Response:
    own, past, num_bytes = items_of(body), tuple[Item, ...](), 0
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id, context.key_digest, "previous_response_id")
        past, num_bytes = previous.conversation, previous.num_bytes
    conversation = (*past, *own)
    size = context.num_body_bytes + num_bytes
    chat = await off_loop(size, chat_of, body, conversation)
    with NAMES.in_errors():
        check_servable(chat, 1, serving)
        prepared = await _prepared(serving, body, chat, conversation, size)
    response_id, request_id = store.new_id(context.request_id), context.request_id
    shown = [] if body.store is False else await off_loop(size, shown_items, own, request_id)
    num_bytes += await off_loop(size, bytes_of, shown)

    def keep(response: dict[str, Any]) -> None:
        if body.store is False:
            return
        made = _ITEMS.validate_python(response["output"])
        kept = Kept(response, shown, (*conversation, *made), num_bytes + bytes_of(response))
        store.put(response_id, context.key_digest, kept)

    begun = await off_loop(size, response_of, body, response_id, int(time.time()))
    formatter = ResponsesFormatter(begun, request_id, TokenNames(serving.tokenizer), keep)
    return respond(
        serving, chat, prepared, formatter, response_id=response_id, context=context, names=NAMES
    )


async def _prepared(
    serving: ServingContext,
    body: ResponsesRequest,
    chat: ChatRequest,
    items: Sequence[Item],
    num_bytes: int,
) -> Prepared:
    """With truncation auto, of as many of the last items as fit."""
    front_end, is_cut = serving.front_end, body.truncation == "auto"
    space = serving.limits.max_model_len - (body.max_output_tokens or 1)

    async def without(num_dropped: int) -> Prepared | RequestError:
        """Or the refusal of what is too long."""
        last = chat
        if num_dropped:
            last = await off_loop(num_bytes, chat_of, body, _last(items, num_dropped))
        try:
            return await front_end.chat(serving, last, num_bytes)
        except RequestError as e:
            if not is_cut or e.code != CONTEXT_LENGTH_EXCEEDED:
                raise
            return e

    def fits(prepared: Prepared | RequestError) -> bool:
        return isinstance(prepared, Prepared) and len(prepared.prompts[0]) <= space

    prepared = await without(0)
    if is_cut and not fits(prepared):
        # where dropping some is not enough all but the last one are
        fewest, most = min(1, len(items) - 1), len(items) - 1
        while fewest < most:
            tried = (fewest + most) // 2
            fewest, most = (fewest, tried) if fits(await without(tried)) else (tried + 1, most)
        prepared = await without(fewest)
    if isinstance(prepared, RequestError):
        raise prepared
    sampling_request = replace(
        prepared.sampling_request, max_tokens_param="max_output_tokens", prompt_param="input"
    )
    return replace(prepared, sampling_request=sampling_request)


def _last(items: Sequence[Item], num_dropped: int) -> Sequence[Item]:
    """Without outputs of calls that are dropped; at least the last item."""
    kept = items[num_dropped:]
    calls = {item.call_id for item in kept if isinstance(item, FunctionCallItem)}
    return [
        item
        for item in kept
        if not isinstance(item, FunctionCallOutputItem) or item.call_id in calls
    ] or kept
