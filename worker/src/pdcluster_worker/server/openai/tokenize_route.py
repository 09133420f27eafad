"""POST /tokenize and /detokenize, as vLLM has them."""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdcluster_worker.server.generation.generation import ServingContext
from pdcluster_worker.server.generation.respond import check_model, not_ready
from pdcluster_worker.server.generation.sampling import check_token_ids
from pdcluster_worker.server.http.json_body import off_loop
from pdcluster_worker.server.http.limits import BodyReader
from pdcluster_worker.server.http.request_context import context_of
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.schemas.fields import Body, Text
from pdcluster_worker.server.schemas.requests import ChatRequest

_SLICE = 1 << 16

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


class TokenizePrompt(Body):
    """Body of POST /tokenize for a text.

    model:              null = the one that is served.
    add_special_tokens: those that the model puts around a prompt; null = true.
    return_token_strs:  the tokens as the vocabulary spells them, too.
    """

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatRequest):
    """Body of POST /tokenize for a conversation: a chat request, whose fields for sampling change
    nothing.
    """

    model: Text = ""
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class Tokenized(BaseModel):
    """Answer of /tokenize.  max_model_len: most tokens of a request; token_strs: null where they
    were not asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """Answer of /detokenize."""

    prompt: str


def _form(body: Any) -> str:
    return "<chat>" if isinstance(body, dict) and "messages" in body else "<prompt>"


TokenizeRequest = Annotated[
    Annotated[TokenizePrompt, Tag("<prompt>")] | Annotated[TokenizeChat, Tag("<chat>")],
    Discriminator(_form),
]


def tokenize_routes(serving: ServingContext, reader: BodyReader) -> list[Route]:
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        num_bytes, max_model_len = context_of(request).num_body_bytes, _check(body.model, serving)
        tokens = await _tokens(body, serving, num_bytes)
        return _json(await off_loop(num_bytes, _tokenized, body, tokens, serving, max_model_len))

    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        _check(body.model, serving)
        num_bytes = context_of(request).num_body_bytes
        await off_loop(num_bytes, check_token_ids, "tokens", body.tokens, serving.limits)
        text = await serving.front_end.decode(serving, body.tokens, num_bytes)
        return _json(Detokenized(prompt=text).model_dump_json().encode())

    tokens, text = with_errors(Tokenized), with_errors(Detokenized)
    return [
        JsonRoute(
            TOKENIZE, TokenizeRequest, tokenize, tokens, reader=reader, others=serving.others
        ),
        JsonRoute(
            DETOKENIZE, DetokenizeRequest, detokenize, text, reader=reader, others=serving.others
        ),
    ]


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _tokenized(
    body: TokenizePrompt | TokenizeChat,
    tokens: Sequence[int],
    serving: ServingContext,
    max_model_len: int,
) -> bytes:
    spelling = cache(serving.tokenizer.token)  # one text for all places of a token
    spelled = [spelling(token_id) for token_id in tokens] if body.return_token_strs else None
    answer = {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": _list(tokens),
        "token_strs": None if spelled is None else _list(spelled),
    }
    return msgspec.json.encode(answer)


def _list(values: Sequence[int] | Sequence[str]) -> msgspec.Raw:
    slices = (values[at : at + _SLICE] for at in range(0, len(values), _SLICE))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in slices) + b"]")


async def _tokens(
    body: TokenizePrompt | TokenizeChat, serving: ServingContext, num_bytes: int
) -> list[int]:
    front_end = serving.front_end
    if isinstance(body, TokenizeChat):
        return (await front_end.chat(serving, body, num_bytes)).prompts[0]
    special = body.add_special_tokens is not False
    return await front_end.encode(serving, body.prompt, num_bytes, add_special_tokens=special)


def _check(model: str | None, serving: ServingContext) -> int:
    """The longest request.  Raises RequestError, 503 while it is not known."""
    if model:
        check_model(model, serving.backend, serving.others)
    if not serving.backend.max_model_len:
        reason = serving.backend.ready() or "its engine has yet to load"
        raise not_ready(reason)
    return serving.backend.max_model_len
