"""Calls of vLLM's front end: its render, derender and token endpoints, and its embeddings."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from pdcluster_worker.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    ConfigError,
    RequestError,
    embeds_only,
    no_embeddings,
)
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient
from pdcluster_worker.stock_engine.responses import read_error

CHAT, COMPLETIONS, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/detokenize"
PATHS = (
    *(f"{path}/{end}" for path in (CHAT, COMPLETIONS) for end in ("render", "derender")),
    DETOKENIZE,
)

EMBEDDINGS = "/v1/embeddings"  # of models that generate no text, which have no others

ASK_SECONDS = 60.0  # for the longest prompt

_LENGTHS = ("input_text", "input_tokens")  # what vLLM names of a prompt that is too long
MISSING = (403, 404, 405)


CountEmbeddings = Callable[[Sequence[int]], AbstractContextManager[Callable[[int], None]]]
"""Counts inputs of so many tokens (0 = a text) while they are embedded; what it yields takes the
tokens of all.
"""


class _EmbeddingInputs(msgspec.Struct):
    input: list[str | list[int]]


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _Embedded(msgspec.Struct):
    usage: _Usage = _Usage()


def to_embed(spec: RequestSpec, model: str, *, attempt: int) -> bytes:
    """Request for a prompt's embedding.  attempt: not used, since vLLM makes its id."""
    return msgspec.json.encode({"model": spec.adapter or model, "input": spec.prompt})


def num_embedded(answer: bytes) -> int:
    """Tokens of all inputs, as the engine counts them."""
    return msgspec.json.decode(answer, type=_Embedded).usage.prompt_tokens


class StockFrontEnd:
    """count: takes embeddings into the engine's load."""

    def __init__(self, http: StockClient, count: CountEmbeddings) -> None:
        self._http = http
        self._count = count

    async def ask(self, path: str, body: bytes) -> bytes:
        """Raises RequestError as vLLM refused it, or HttpFailedError."""
        if path != EMBEDDINGS:
            return await ask(self._http, path, body)
        inputs = msgspec.json.decode(body, type=_EmbeddingInputs).input
        sizes = [0 if isinstance(each, str) else len(each) for each in inputs]
        with self._count(sizes) as embedded:
            answer = await ask(self._http, path, body)
            embedded(num_embedded(answer))
        return answer


async def ask(http: StockClient, path: str, body: bytes) -> bytes:
    """Raises RequestError as vLLM refused it, or HttpFailedError."""
    status, answer = await _post(http, path, body)
    if status == 200:
        return answer
    if status in MISSING:
        raise no_embeddings() if path == EMBEDDINGS else embeds_only()
    error = read_error(status, answer)
    if not error.is_refusal:
        raise HttpFailedError(f"the engine answered {status} to {path}: {error}")
    is_long = error.param in _LENGTHS
    raise RequestError(
        f"the engine refuses the request: {error}",
        code=CONTEXT_LENGTH_EXCEEDED if is_long else None,
        param=None if is_long else error.param,
    )


async def check_endpoints(http: StockClient, version: str) -> None:
    """Raise ConfigError where vLLM has no such endpoints."""
    for path in PATHS:
        status, _ = await _post(http, path, b"{}")
        if status in MISSING:
            raise ConfigError(
                f"model.frontend is engine, and vLLM {version} has no {path}: use an image of 0.30 "
                "or newer, or leave model.frontend out"
            )


async def makes_embeddings(http: StockClient) -> bool:
    """True for a model that makes embeddings, and no text."""
    status, _ = await _post(http, EMBEDDINGS, b"{}")
    return status not in MISSING


async def _post(http: StockClient, path: str, body: bytes) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(ASK_SECONDS), http.request("POST", path, body) as answer:
            return answer.status, await answer.body()
    except TimeoutError as e:
        message = f"no answer to {path} in {ASK_SECONDS:g} s"
        raise HttpFailedError(message, is_late=True) from e
