"""POST /tokenize and /detokenize, as vLLM has them: what the model sees of a text or a
conversation, and back.
"""

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Discriminator, Field, Tag

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors.openai import ErrorReply
from pdcluster_worker.server.generation.generation import Serving
from pdcluster_worker.server.generation.respond import check_model
from pdcluster_worker.server.generation.sampling import check_token_ids
from pdcluster_worker.server.openai.chat import prepare
from pdcluster_worker.server.schemas.fields import Body, Text
from pdcluster_worker.server.schemas.requests import ChatRequest

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

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 408, 413, 503)
}


def add_tokenizing(app: FastAPI, serving: Serving) -> None:
    """Serve both routes."""

    @app.post(TOKENIZE, responses=_ERRORS)
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        max_model_len = _check(body.model, serving)
        tokens = await _tokens(body, serving)
        spelled = (
            [serving.tokenizer.token(token_id) for token_id in tokens]
            if body.return_token_strs
            else None
        )
        return Tokenized(
            count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=spelled
        )

    @app.post(DETOKENIZE, responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        _check(body.model, serving)
        check_token_ids("tokens", body.tokens, serving.limits)
        return Detokenized(prompt=await serving.tokenizer.decode(body.tokens))


async def _tokens(body: TokenizePrompt | TokenizeChat, serving: Serving) -> list[int]:
    if isinstance(body, TokenizePrompt):
        if body.add_special_tokens is False:
            return await serving.tokenizer.encode_bare(body.prompt)
        return (await serving.tokenizer.encode([body.prompt]))[0]
    return (await prepare(serving, body)).prompt


def _check(model: str | None, serving: Serving) -> int:
    """The longest request.

    Raises RequestError for another model, and 503 while the model's limits are not known.
    """
    if model:
        check_model(model, serving.backend.model_name)
    if not serving.backend.max_model_len:
        reason = serving.backend.ready() or "its engine has yet to load"
        raise RequestError(
            f"this worker is not ready: {reason}",
            status=503,
            code="not_ready",
            retry_after_seconds=1,
        )
    return serving.backend.max_model_len
