"""POST /v1/responses, and what is done with the responses that are kept."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.generation.formatter import to_json
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.http.body_reader import BodyReader
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.request_context import RequestContext, context_of
from pdcluster_worker.server.http.routes import ApiRoute, JsonRoute, with_errors
from pdcluster_worker.server.openai.chat import PreparedChat, prepare
from pdcluster_worker.server.openai.logprobs import TokenNames
from pdcluster_worker.server.responses import protocol
from pdcluster_worker.server.responses.chat_request import NAMES, chat_of, items_of
from pdcluster_worker.server.responses.formatter import Begun, ResponsesFormatter
from pdcluster_worker.server.responses.schemas import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    ResponsesRequest,
)
from pdcluster_worker.server.responses.store import Kept, ResponseStore, bytes_of
from pdcluster_worker.server.schemas.requests import ChatRequest

PATH = "/v1/responses"

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def response_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    """Responses are kept here."""
    store = ResponseStore(serving.clock)

    async def create(body: ResponsesRequest, request: Request) -> Response:
        return await _answer(serving, store, body, context_of(request))

    answers, path = with_errors(None), f"{PATH}/{{response_id}}"
    return [
        JsonRoute(PATH, ResponsesRequest, create, answers, reader=reader, streams=True),
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
        raise RequestError(
            "stream: a response that is kept is not streamed again: leave it out",
            param="stream",
        )
    return _json(_kept(store, request).body)


async def input_items(store: ResponseStore, request: Request) -> Response:
    items = _kept(store, request).input
    ids = [item["id"] for item in items]
    return _json(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0],
            "last_id": ids[-1],
            "has_more": False,
        }
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
    own = items_of(body)
    past: tuple[Item, ...] = ()
    num_bytes = 0
    if body.previous_response_id is not None:
        previous = store.get(body.previous_response_id, context.key_digest, "previous_response_id")
        past, num_bytes = previous.conversation, previous.num_bytes
    conversation = (*past, *own)
    size = context.num_body_bytes + num_bytes
    chat = await off_loop(size, chat_of, body, conversation)
    with NAMES.in_errors():
        check_servable(chat, 1, serving)
        prepared = await off_loop(size, _prepared, serving, body, chat, conversation)
    response_id, request_id = store.new_id(context.request_id), context.request_id
    shown, shown_bytes = await off_loop(size, _shown, body, own, request_id)

    def keep(response: dict[str, Any]) -> None:
        if body.store is False:
            return
        made = _ITEMS.validate_python(response["output"])
        kept_bytes = num_bytes + shown_bytes + bytes_of(response)
        kept = Kept(response, shown, (*conversation, *made), kept_bytes)
        store.put(response_id, context.key_digest, kept)

    response = await off_loop(size, protocol.response, body, response_id, int(time.time()))
    begun = Begun(response, request_id, keep, TokenNames(serving.tokenizer))
    sampling_request = replace(
        prepared.sampling_request, max_tokens_param="max_output_tokens", prompt_param="input"
    )
    return respond(
        serving,
        chat,
        sampling_request,
        [prepared.prompt],
        ResponsesFormatter(begun),
        response_id=response_id,
        context=context,
        rules=prepared.rules,
        names=NAMES,
    )


def _shown(
    body: ResponsesRequest, own: Sequence[Item], request_id: str
) -> tuple[list[dict[str, Any]], int]:
    shown = [] if body.store is False else protocol.shown_items(own, request_id)
    return shown, bytes_of(shown)


def _prepared(
    serving: ServingContext, body: ResponsesRequest, chat: ChatRequest, items: Sequence[Item]
) -> PreparedChat:
    """With truncation auto, of as many of the last items as fit."""
    prepared = prepare(serving, chat)
    space = serving.limits.max_model_len - (body.max_output_tokens or 1)
    if body.truncation != "auto" or len(prepared.prompt) <= space:
        return prepared
    # of items that are dropped; it is enough to drop `most`, or nothing is
    fewest, most = 1, len(items) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        tried = prepare(serving, chat_of(body, _last(items, middle)))
        fewest, most = (fewest, middle) if len(tried.prompt) <= space else (middle + 1, most)
    return prepare(serving, chat_of(body, _last(items, most)))


def _last(items: Sequence[Item], num_dropped: int) -> Sequence[Item]:
    """Without outputs of calls that are dropped; at least the last item."""
    kept = items[num_dropped:]
    calls = {item.call_id for item in kept if isinstance(item, FunctionCallItem)}
    return [
        item
        for item in kept
        if not isinstance(item, FunctionCallOutputItem) or item.call_id in calls
    ] or kept
