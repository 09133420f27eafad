"""Runs our engine messages on a stock engine's server, each request as a task of HTTP exchanges."""

import asyncio
import logging
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import EngineInput, EngineOutput, Received
from pdcluster_worker.messages.requests import (
    EPOCH_BYTES,
    PromptLogprob,
    RequestSpec,
    SamplingParams,
    Token,
)
from pdcluster_worker.stock_engine import generate_api, responses
from pdcluster_worker.stock_engine.engine_api import VLLM_API, EngineApi
from pdcluster_worker.stock_engine.engine_load import FETCH_SECONDS
from pdcluster_worker.stock_engine.http import HttpAnswer, HttpFailedError, StockClient
from pdcluster_worker.stock_engine.metrics_page import Scrape
from pdcluster_worker.stock_engine.reports import Reports
from pdcluster_worker.stock_engine.responses import StockEngineError, TokenStream

logger = logging.getLogger(__name__)

Emit = Callable[[Sequence[EngineOutput]], None]
Exchange = Callable[..., Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class StockRequest:
    spec: RequestSpec
    trace: Mapping[str, str] = field(default_factory=dict)  # HTTP headers
    epoch: bytes | None = None  # of the transfer while KV is expected; None = not
    task: asyncio.Task[None] | None = None  # until its answer has ended
    is_fetching: bool = False  # vLLM has the request with that KV, and no token has come
    attempt: int = 0


class StockEngine:
    """emit: receives the outputs.  trace: headers of a request's trace."""

    def __init__(
        self,
        http: StockClient,
        model: str,
        reports: Reports,
        emit: Emit,
        *,
        trace: Callable[[str], Mapping[str, str]] = lambda _: {},
        api: EngineApi = VLLM_API,
    ) -> None:
        self._http = http
        self._model = model
        self._reports = reports
        self._emit = emit
        self._trace = trace
        self._api = api
        self._requests: dict[str, StockRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[None] | None = None
        self._num_probes = 0
        reports.on_page = self._give_up

    def take(self, message: EngineInput) -> None:
        match message:
            case messages.Submit(spec=spec):
                self._submit(self._new(spec))
            case messages.Receive(spec=spec):
                self._receive(spec)
            case messages.Fetch():
                self._fetch(message)
            case messages.ReceiveFailed(request_id=request_id, epoch=epoch):
                if (request := self._waiting(request_id, epoch)) is not None:
                    self._submit(request)
            case messages.Prefill(spec=spec):
                request = self._new(spec)
                attempt = self._attempt(request, is_for_peer=True)
                body = generate_api.prefill(spec, self._model, attempt=attempt)
                self._begin(request, self._prefill, body)
            case messages.Abort(request_id=request_id):
                self._forget(request_id)
            case messages.AskSnapshot():
                self._emit([self._reports.cache.snapshot()])
            case messages.Ping():
                self._reports.answer_ping()
                self._probe_stalled()
                return
            case _:
                logger.warning("ignored a message kind=%s", type(message).__name__)
        self._reports.taken()

    def _probe_stalled(self) -> None:
        """Send one that has stalled a prompt of our own: vLLM shows no progress while idle."""
        if self._reports.has_stalled() and self._probe is None:
            self._probe = asyncio.create_task(self._run_probe())
            self._tasks.add(self._probe)
            self._probe.add_done_callback(self._tasks.discard)

    async def _run_probe(self) -> None:
        self._num_probes += 1
        spec = RequestSpec(f"probe-{self._num_probes}", [1], SamplingParams(max_tokens=1, seed=0))
        body = self._api.prompt_only(spec, self._model, attempt=1)
        try:
            await self._http.post(self._api.generate_path, body)
            self._reports.load.num_steps += 1
        except HttpFailedError as e:
            logger.warning("the engine that stalled did not answer a probe reason=%s", e)
        finally:
            self._probe = None

    def close(self) -> None:
        """Abort every request without output."""
        for task in self._tasks:
            task.cancel()
        for request_id in list(self._requests):
            self._forget(request_id)
        self._http.close()

    # --- requests ---------------------------------------------------------------------------

    def _new(self, spec: RequestSpec) -> StockRequest:
        request = StockRequest(spec, self._trace(spec.request_id))
        self._requests[spec.request_id] = request
        return request

    def _submit(self, request: StockRequest) -> None:
        """Prefill and decode here."""
        spec = request.spec
        request.epoch = None
        self._has_fetched(request)
        if self._is_refused(request):
            return
        if spec.sampling.prompt_logprobs is not None and not spec.output:
            attempt = self._attempt(request)
            body = self._api.prompt_only(spec, self._model, attempt=attempt)
            self._begin(request, self._score, body)
        else:
            self._begin(request, self._stream, *self._generation(request))

    def _is_refused(self, request: StockRequest) -> bool:
        """Fail a request that the engine would run wrongly."""
        refused = self._api.refusal(request.spec)
        if refused is not None:
            message, param = refused
            self._fail(request, StockEngineError(message, is_refusal=True, param=param))
        return refused is not None

    def _generation(
        self, request: StockRequest, scores: Sequence[PromptLogprob] = ()
    ) -> tuple[bytes, TokenStream]:
        """Body and reader of the next attempt.  scores: of the prompt, for the first token."""
        spec = request.spec
        body = self._api.generate(spec, self._model, attempt=self._attempt(request))
        hit = self._reports.expected_hit(spec)
        stream = TokenStream(
            spec, cached_tokens=hit, prompt_logprobs=scores, decode=self._api.decode_chunk
        )
        return body, stream

    def _receive(self, spec: RequestSpec) -> None:
        needed = self._reports.num_blocks(spec.num_tokens + 1)
        if not self._reports.has_space(needed):
            self._reports.report()  # else the server would retry on older figures
            self._emit([messages.ReceiveRefused(spec.request_id, needed)])
            return
        request = self._new(spec)
        if self._is_refused(request):
            return
        request.epoch = secrets.token_bytes(EPOCH_BYTES)
        self._reports.load.reserve(spec.request_id, needed)
        self._emit([messages.ReceiveReady(spec.request_id, request.epoch, 0, [])])

    def _fetch(self, message: messages.Fetch) -> None:
        request = self._waiting(message.request_id, message.epoch)
        if request is None:
            return
        spec = request.spec
        try:
            handle = responses.decode_handle(message.handle)
        except StockEngineError as e:
            self._emit([messages.FetchFailed(spec.request_id, str(e))])
            return
        request.is_fetching = True
        attempt = self._attempt(request)
        body = generate_api.generate(spec, self._model, attempt=attempt, transfer=handle.transfer)
        self._reports.fetches.begun(spec.request_id, spec.priority, time.monotonic())
        stream = TokenStream(spec, handle=handle)
        run = self._verify if spec.verify_transfer else self._stream
        self._begin(request, run, body, stream)

    def _give_up(self) -> None:
        """Fail fetches that take too long: the peer may be gone without vLLM noticing."""
        for request_id in self._reports.fetches.overdue(time.monotonic()):
            request = self._requests[request_id]
            self._cancel(request)
            message = f"its fetch was under way for {FETCH_SECONDS:g} s, and no token came"
            self._fail(request, StockEngineError(message))

    def _has_fetched(self, request: StockRequest) -> None:
        """The KV has arrived or is not expected any more."""
        request.is_fetching = False
        self._reports.fetches.ended(request.spec.request_id)

    def _waiting(self, request_id: str, epoch: bytes) -> StockRequest | None:
        """The request with that transfer; None for a stale message."""
        request = self._requests.get(request_id)
        if request is None or request.epoch != epoch:
            logger.info("stale message of a transfer request=%s", request_id)
            return None
        return request

    def _attempt(self, request: StockRequest, *, is_for_peer: bool = False) -> int:
        """Count what is sent next.  A prompt counts once; one for a peer counts at the peer, and
        one of a verification nowhere.
        """
        request.attempt += 1
        num_tokens = request.spec.num_tokens
        is_counted = not (is_for_peer or request.spec.verify_transfer)
        self._reports.load.begun(
            request.spec.request_id,
            num_tokens,
            is_fetching=request.is_fetching,
            is_new=request.attempt == 1 and is_counted,
            has_space=self._reports.can_begin(num_tokens),
        )
        return request.attempt

    def _begin(self, request: StockRequest, exchange: Exchange, *args: Any) -> None:
        """Run the next exchange of a request in place of its last one."""
        self._cancel(request)
        request.task = asyncio.create_task(self._run(request, exchange, *args))
        self._tasks.add(request.task)
        request.task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _cancel(request: StockRequest) -> None:
        task, request.task = request.task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _forget(self, request_id: str) -> None:
        """Forget a request, and abort it if it runs."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._has_fetched(request)
            self._cancel(request)
            self._reports.load.ended(request_id)

    # --- tasks ------------------------------------------------------------------------------

    async def _run(self, request: StockRequest, exchange: Exchange, *args: Any) -> None:
        try:
            await exchange(request, *args)
        except HttpFailedError as e:
            if request.task is not None and await self._reports.page.is_alive(str(e)):
                self._fail(request, StockEngineError(f"the engine broke off its answer: {e}"))
        except Exception as e:
            if not isinstance(e, StockEngineError):
                logger.exception("an exchange failed request=%s", request.spec.request_id)
                e = StockEngineError(f"the engine's client failed: {e!r}")
            if request.task is not None:  # else its last token has come
                self._fail(request, e)

    @asynccontextmanager
    async def _post(self, request: StockRequest, body: bytes) -> AsyncIterator[HttpAnswer]:
        """An answer 200.  Raises StockEngineError, HttpFailedError."""
        path, trace = self._api.generate_path, request.trace
        async with self._http.request("POST", path, body, trace) as answer:
            if answer.status != 200:
                raise responses.read_error(answer.status, await answer.body())
            yield answer

    async def _stream(
        self, request: StockRequest, body: bytes, stream: TokenStream, before: Scrape | None = None
    ) -> None:
        """before: counts what was received since, before the first token."""
        assert request.task is not None
        own = weakref.ref(request.task)

        def take(chunk: bytes) -> None:
            # A task that was cancelled has not ended yet when its connection is read once more.
            is_current = request.task is not None and request.task is own()
            if is_current and (tokens := stream.feed(chunk)):
                self._made(request, tokens, is_end=stream.has_ended)

        async with self._post(request, body) as answer:
            if before is not None:
                await answer.wait_for_body()
                self._emit([received(request.spec, before, await self._numbers())])
            await answer.follow(take)
        if not stream.has_ended:
            raise StockEngineError("the engine ended its answer before the last token")

    async def _verify(self, request: StockRequest, body: bytes, stream: TokenStream) -> None:
        await self._stream(request, body, stream, await self._numbers())

    async def _numbers(self) -> Scrape:
        try:
            return await self._reports.numbers()
        except HttpFailedError as e:
            raise StockEngineError(f"the engine does not say what it fetched: {e}") from e

    async def _score(self, request: StockRequest, body: bytes) -> None:
        """Log probabilities of a prompt; its tokens are generated next, from the cache."""
        async with self._post(request, body) as answer:
            body = await answer.body()
            scores = responses.read_prompt_logprobs(body, request.spec, self._api.decode_whole)
        await self._stream(request, *self._generation(request, scores))

    async def _prefill(self, request: StockRequest, body: bytes) -> None:
        """Report the handle of KV that vLLM keeps for a peer."""
        async with self._post(request, body) as answer:
            handle = responses.read_prefill(await answer.body(), request.spec)
        request_id = request.spec.request_id
        self._reports.kept()
        seconds = self._reports.load.prefilled(request_id, num_cached=handle.cached_tokens)
        self._forget(request_id)
        data = responses.encode_handle(replace(handle, prefill_seconds=seconds))
        self._emit([messages.PrefillDone(request_id, 0, 0.0, handle=data)])
        self._reports.changed()

    def _made(self, request: StockRequest, tokens: list[Token], *, is_end: bool) -> None:
        request_id = request.spec.request_id
        self._has_fetched(request)
        request.epoch = None
        cached_tokens = tokens[0].cached_tokens
        seconds = self._reports.load.made(request_id, len(tokens), num_cached=cached_tokens)
        if seconds is not None:
            tokens[0] = replace(tokens[0], queue_seconds=0.0, prefill_seconds=seconds)
        if is_end:
            request.task = None  # it reads the answer to its end
            self._forget(request_id)
        self._emit([messages.Tokens(tokens)])
        self._reports.changed()

    def _fail(self, request: StockRequest, error: StockEngineError) -> None:
        """Fail a request; one that fetches gets FetchFailed and continues without that KV."""
        request_id = request.spec.request_id
        request.task = None
        if request.is_fetching:
            self._has_fetched(request)
            self._reports.load.ended(request_id)
            self._emit([messages.FetchFailed(request_id, str(error))])
        else:
            self._forget(request_id)
            failed = messages.RequestFailed(
                request_id, str(error), is_refusal=error.is_refusal, param=error.param
            )
            self._emit([failed])
        self._reports.changed()


def received(spec: RequestSpec, before: Scrape, now: Scrape) -> Received:
    """Count what one request has received; with concurrent fetches its bytes may be unknown."""
    num_tokens = now.external_tokens - before.external_tokens
    num_tokens -= now.host_tokens - before.host_tokens
    if num_tokens > len(spec.prompt):
        return Received(spec.request_id, len(spec.prompt))
    return Received(
        spec.request_id,
        num_tokens,
        num_bytes=now.bytes_received - before.bytes_received,
        seconds=now.transfer_seconds - before.transfer_seconds,
    )
