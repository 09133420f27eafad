"""POST /v1/messages and /v1/messages/count_tokens, for clients of Anthropic's API."""

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_worker.server.anthropic.chat_request import NAMES, chat_of
from pdcluster_worker.server.anthropic.formatter import MessagesFormatter
from pdcluster_worker.server.anthropic.schemas import CountRequest, MessagesPrompt, MessagesRequest
from pdcluster_worker.server.errors import MESSAGES, MessagesError
from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_servable, respond
from pdcluster_worker.server.http.body_reader import BodyReader
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.request_context import RequestContext, context_of
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.openai.chat import PreparedChat, prepare
from pdcluster_worker.server.schemas.requests import ChatRequest

COUNT_PATH = f"{MESSAGES}/count_tokens"


class TokenCount(BaseModel):
    """Answer of count_tokens."""

    input_tokens: int


def message_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await _answer(serving, body, context_of(request))

    async def count_tokens(body: CountRequest, request: Request) -> Response:
        _, prepared = await _prepared(serving, body, context_of(request))
        count = TokenCount(input_tokens=len(prepared.prompt))
        return Response(count.model_dump_json(), media_type="application/json")

    message, count = with_errors(None, MessagesError), with_errors(TokenCount, MessagesError)
    return [
        JsonRoute(MESSAGES, MessagesRequest, messages, message, reader=reader, streams=True),
        JsonRoute(COUNT_PATH, CountRequest, count_tokens, count, reader=reader),
    ]


async def _answer(
    serving: ServingContext, body: MessagesRequest, context: RequestContext
) -> Response:
    chat, prepared = await _prepared(serving, body, context)
    message_id = f"msg_{context.request_id}"
    return respond(
        serving,
        chat,
        prepared.sampling_request,
        [prepared.prompt],
        MessagesFormatter(message_id, body.model, context.request_id),
        response_id=message_id,
        context=context,
        rules=prepared.rules,
        names=NAMES,
    )


async def _prepared(
    serving: ServingContext, body: MessagesPrompt, context: RequestContext
) -> tuple[ChatRequest, PreparedChat]:
    num_bytes, reasons = context.num_body_bytes, serving.parsers.reasoning is not None
    chat = await off_loop(num_bytes, chat_of, body, reasons=reasons)
    with NAMES.in_errors():
        check_servable(chat, 1, serving)
        return chat, await off_loop(num_bytes, prepare, serving, chat)
