"""Exchanges of a request with vLLM; any status but 200, or an error in the body, fails it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdcluster_worker.messages.engine import Received
from pdcluster_worker.messages.requests import PromptLogprob, RequestSpec, Token
from pdcluster_worker.vllm_engine import generate_api, responses
from pdcluster_worker.vllm_engine.http import HttpExchange, HttpFailedError, VllmClient
from pdcluster_worker.vllm_engine.responses import (
    KvTransferParams,
    TokenStream,
    VllmError,
    read_error,
)
from pdcluster_worker.vllm_engine.vllm_metrics import Scrape, read_numbers

OK = 200


@dataclass(slots=True, eq=False)
class VllmRequest:
    spec: RequestSpec
    epoch: bytes | None = None  # of the transfer while KV is expected; None = not
    exchange: HttpExchange | None = None
    is_fetching: bool = False  # vLLM has the request with that KV, and no token has come
    trace: Mapping[str, str] = field(default_factory=dict)  # HTTP headers
    attempt: int = 0


class EngineEvents(Protocol):
    """Implemented by `vllm_engine.engine.VllmEngine`."""

    def made(self, request: VllmRequest, tokens: list[Token], *, is_end: bool) -> None: ...

    def verified(self, received: Received) -> None: ...

    def prefilled(self, request: VllmRequest, handle: KvTransferParams) -> None: ...

    def generate(self, request: VllmRequest, scores: list[PromptLogprob]) -> None: ...

    def broken_off(self, request: VllmRequest, exchange: HttpExchange, reason: str) -> None: ...

    def failed(self, request: VllmRequest, error: VllmError) -> None: ...


class _Answer(HttpExchange, ABC):
    """An answer with another status than 200 is an error."""

    def __init__(self, engine: EngineEvents, request: VllmRequest, body: bytes) -> None:
        super().__init__("POST", generate_api.PATH, body, request.trace)
        self._engine = engine
        self._request = request
        self._parts: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_end(self) -> None:
        body = b"".join(self._parts)
        if self.status != OK:
            self._fail(read_error(self.status, body))
            return
        try:
            self.read(body)
        except VllmError as e:
            self._fail(e)

    def on_lost(self, reason: str) -> None:
        self._engine.broken_off(self._request, self, reason)

    @abstractmethod
    def read(self, body: bytes) -> None:
        """Handle a complete answer.  Raises VllmError."""

    def _fail(self, error: VllmError) -> None:
        self.close()
        self._engine.failed(self._request, error)


class TokenAnswer(_Answer):
    def __init__(
        self, engine: EngineEvents, request: VllmRequest, body: bytes, stream: TokenStream
    ) -> None:
        super().__init__(engine, request, body)
        self._stream = stream

    def on_body(self, data: bytes) -> None:
        if self.status != OK:
            super().on_body(data)
            return
        try:
            tokens = self._stream.feed(data)
        except VllmError as e:
            self._fail(e)
            return
        if tokens:
            self._engine.made(self._request, tokens, is_end=self._stream.has_ended)

    def on_lost(self, reason: str) -> None:
        if not self._stream.has_ended:
            super().on_lost(reason)

    def read(self, body: bytes) -> None:
        if not self._stream.has_ended:
            raise VllmError("the engine ended its answer before the last token")


class VerifiedAnswer(TokenAnswer):
    """Tokens of a request whose fetched KV is counted before its first token (`received`)."""

    def __init__(
        self, engine: EngineEvents, request: VllmRequest, body: bytes, stream: TokenStream
    ) -> None:
        super().__init__(engine, request, body, stream)
        self._before = Scrape()
        self._counting: asyncio.Task[None] | None = None
        self._held: list[bytes] | None = []
        self._has_ended = False

    def count_first(self, http: VllmClient) -> None:
        """Send the request after reading the engine's counts."""
        self._counting = asyncio.create_task(self._begin(http))

    def on_body(self, data: bytes) -> None:
        if self._held is None or self.status != OK:
            super().on_body(data)
            return
        self._held.append(data)
        if self._counting is None:
            self._counting = asyncio.create_task(self._count())

    def on_end(self) -> None:
        self._has_ended = True
        if self._held is None or self.status != OK:
            super().on_end()

    def close(self) -> None:
        super().close()
        if self._counting is not None and self._counting is not asyncio.current_task():
            self._counting.cancel()

    async def _begin(self, http: VllmClient) -> None:
        self._http = http
        try:
            self._before = await _page(http)
        except HttpFailedError as e:
            self._fail(VllmError(f"the engine does not say what it fetched: {e}"))
            return
        self._counting = None
        http.begin(self)

    async def _count(self) -> None:
        try:
            now = await _page(self._http)
        except HttpFailedError as e:
            self._fail(VllmError(f"the engine does not say what it fetched: {e}"))
            return
        self._engine.verified(received(self._request.spec, self._before, now))
        held, self._held = self._held or [], None
        for data in held:
            if not self.is_closed:
                super().on_body(data)
        if self._has_ended and not self.is_closed:
            super().on_end()


def received(spec: RequestSpec, before: Scrape, now: Scrape) -> Received:
    """Count what one request has received; with concurrent fetches its bytes may be unknown."""
    num_tokens = now.external_tokens - before.external_tokens
    if num_tokens > len(spec.prompt):
        return Received(spec.request_id, len(spec.prompt))
    return Received(
        spec.request_id,
        num_tokens,
        num_bytes=now.bytes_received - before.bytes_received,
        seconds=now.transfer_seconds - before.transfer_seconds,
    )


async def _page(http: VllmClient) -> Scrape:
    """Raises HttpFailedError."""
    return read_numbers(await http.get("/metrics"))


class PrefillAnswer(_Answer):
    """The handle of KV that is kept for a peer."""

    def read(self, body: bytes) -> None:
        self._engine.prefilled(self._request, responses.read_prefill(body, self._request.spec))


class PromptAnswer(_Answer):
    """Log probabilities of a prompt; its tokens are generated next, from the cache."""

    def read(self, body: bytes) -> None:
        scores = responses.read_prompt_logprobs(body, self._request.spec)
        self._engine.generate(self._request, scores)
