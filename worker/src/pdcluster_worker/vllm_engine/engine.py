"""Runs our engine messages on a vLLM server, a request as one HTTP exchange at a time.

vLLM keeps the KV of a prefill until the peer fetches it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import EngineInput, EngineOutput
from pdcluster_worker.messages.requests import EPOCH_BYTES, PromptLogprob, RequestSpec, Token
from pdcluster_worker.vllm_engine import generate_api, responses
from pdcluster_worker.vllm_engine.fetches import FETCH_SECONDS
from pdcluster_worker.vllm_engine.http import HttpExchange, VllmClient
from pdcluster_worker.vllm_engine.reports import Reports
from pdcluster_worker.vllm_engine.request_exchanges import (
    PrefillAnswer,
    PromptAnswer,
    TokenAnswer,
    VerifiedAnswer,
    VllmRequest,
)
from pdcluster_worker.vllm_engine.responses import TokenStream, VllmError

logger = logging.getLogger(__name__)

Emit = Callable[[Sequence[EngineOutput]], None]


class VllmEngine:
    """emit: receives the outputs.  trace: headers of a request's trace."""

    def __init__(
        self,
        http: VllmClient,
        model: str,
        reports: Reports,
        emit: Emit,
        trace: Callable[[str], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self._http = http
        self._model = model
        self._reports = reports
        self._emit = emit
        self._trace = trace
        self._requests: dict[str, VllmRequest] = {}
        self._polling: set[asyncio.Task[None]] = set()
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
                self._prefill(self._new(spec))
            case messages.Abort(request_id=request_id):
                self._forget(request_id)
            case messages.AskSnapshot():
                self._emit([self._reports.cache.snapshot()])
            case messages.Ping():
                self._reports.answer_ping()
                return
            case _:
                logger.warning("ignored a message kind=%s", type(message).__name__)
        self._reports.taken()

    def close(self) -> None:
        """Abort every request without output."""
        for polling in self._polling:
            polling.cancel()
        for request_id in list(self._requests):
            self._forget(request_id)

    # --- requests ---------------------------------------------------------------------------

    def _new(self, spec: RequestSpec) -> VllmRequest:
        trace = self._trace(spec.request_id)
        request = self._requests[spec.request_id] = VllmRequest(spec, trace=trace)
        return request

    def _submit(self, request: VllmRequest) -> None:
        """Prefill and decode here."""
        spec = request.spec
        request.epoch = None
        self._has_fetched(request)
        if self._is_refused(request):
            return
        if spec.sampling.prompt_logprobs is not None and not spec.output:
            body = generate_api.prompt_only(spec, self._model, attempt=self._attempt(request))
            self._begin(request, PromptAnswer(self, request, body))
        else:
            self.generate(request)

    def _is_refused(self, request: VllmRequest) -> bool:
        """Fail a request that vLLM would run wrongly (`generate_api.refusal`)."""
        refused = generate_api.refusal(request.spec)
        if refused is not None:
            message, param = refused
            self.failed(request, VllmError(message, is_refusal=True, param=param))
        return refused is not None

    def generate(self, request: VllmRequest, scores: Sequence[PromptLogprob] = ()) -> None:
        """scores: of the prompt, reported with the first token."""
        spec = request.spec
        body = generate_api.generate(spec, self._model, attempt=self._attempt(request))
        hit = self._reports.expected_hit(spec)
        stream = TokenStream(spec, cached_tokens=hit, prompt_logprobs=scores)
        self._begin(request, TokenAnswer(self, request, body, stream))

    def _receive(self, spec: RequestSpec) -> None:
        needed = self._reports.num_blocks(len(spec.prompt) + len(spec.output) + 1)
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
        except VllmError as e:
            self._emit([messages.FetchFailed(spec.request_id, str(e))])
            return
        attempt = self._attempt(request)
        body = generate_api.generate(spec, self._model, attempt=attempt, transfer=handle.transfer)
        request.is_fetching = True
        self._reports.fetches.begun(spec.request_id, spec.priority, time.monotonic())
        stream = TokenStream(spec, handle=handle)
        if spec.verify_transfer:
            answer = VerifiedAnswer(self, request, body, stream)
            self._begin(request, answer, lambda: answer.count_first(self._http))
        else:
            self._begin(request, TokenAnswer(self, request, body, stream))

    def _give_up(self) -> None:
        """Fail fetches that take too long: the peer may be gone without vLLM noticing."""
        for request_id in self._reports.fetches.overdue(time.monotonic()):
            request = self._requests[request_id]
            if request.exchange is not None:
                request.exchange.close()
            message = f"its fetch was under way for {FETCH_SECONDS:g} s, and no token came"
            self.failed(request, VllmError(message))

    def _has_fetched(self, request: VllmRequest) -> None:
        """The KV has arrived or is not expected any more."""
        request.is_fetching = False
        self._reports.fetches.ended(request.spec.request_id)

    def _waiting(self, request_id: str, epoch: bytes) -> VllmRequest | None:
        """The request with that transfer; None for a stale message."""
        request = self._requests.get(request_id)
        if request is None or request.epoch != epoch:
            logger.info("stale message of a transfer request=%s", request_id)
            return None
        return request

    def _prefill(self, request: VllmRequest) -> None:
        body = generate_api.prefill(request.spec, self._model, attempt=self._attempt(request))
        self._begin(request, PrefillAnswer(self, request, body))

    def _attempt(self, request: VllmRequest) -> int:
        request.attempt += 1
        return request.attempt

    def _begin(
        self, request: VllmRequest, exchange: HttpExchange, begin: Callable[[], None] | None = None
    ) -> None:
        """Send the request, replacing its previous exchange.  begin: sends it in another way."""
        if request.exchange is not None:
            request.exchange.close()
        spec = request.spec
        request.exchange = exchange
        num_tokens = len(spec.prompt) + len(spec.output)
        # A prompt counts once, however often it is sent; one for a peer counts at the peer.
        is_new = request.attempt == 1 and not isinstance(exchange, PrefillAnswer)
        self._reports.load.begun(
            spec.request_id,
            num_tokens,
            is_fetching=request.is_fetching,
            is_new=is_new,
            has_space=self._reports.can_begin(num_tokens),
        )
        if begin is None:
            self._http.begin(exchange)
        else:
            begin()

    def _forget(self, request_id: str) -> None:
        """Forget a request, and abort it if it runs."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._has_fetched(request)
        if request.exchange is not None:
            request.exchange.close()
        self._reports.load.ended(request_id)

    # --- called by exchanges ----------------------------------------------------------------

    def verified(self, received: messages.Received) -> None:
        self._emit([received])

    def made(self, request: VllmRequest, tokens: list[Token], *, is_end: bool) -> None:
        request_id = request.spec.request_id
        self._has_fetched(request)
        request.epoch = None
        cached_tokens = tokens[0].cached_tokens
        seconds = self._reports.load.made(request_id, len(tokens), num_cached=cached_tokens)
        if seconds is not None:
            tokens[0] = replace(tokens[0], queue_seconds=0.0, prefill_seconds=seconds)
        if is_end:
            request.exchange = None  # its connection is kept once its last bytes have come
            self._forget(request_id)
        self._emit([messages.Tokens(tokens)])
        self._reports.changed()

    def prefilled(self, request: VllmRequest, handle: responses.KvTransferParams) -> None:
        """Report the handle of KV that vLLM keeps for a peer."""
        request_id = request.spec.request_id
        self._reports.kept()
        cached_tokens = handle.cached_tokens
        seconds = self._reports.load.prefilled(request_id, num_cached=cached_tokens)
        self._forget(request_id)
        data = responses.encode_handle(replace(handle, prefill_seconds=seconds))
        self._emit([messages.PrefillDone(request_id, 0, 0.0, handle=data)])
        self._reports.changed()

    def broken_off(self, request: VllmRequest, exchange: HttpExchange, reason: str) -> None:
        """Fail a request whose answer broke off, or report that the engine has ended."""

        async def poll() -> None:
            is_alive = await self._reports.is_alive(reason)
            is_known = self._requests.get(request.spec.request_id) is request
            if is_alive and is_known and request.exchange is exchange:
                message = f"the engine broke off its answer: {reason}"
                self.failed(request, VllmError(message))

        polling = asyncio.create_task(poll())
        self._polling.add(polling)
        polling.add_done_callback(self._polling.discard)

    def failed(self, request: VllmRequest, error: VllmError) -> None:
        """Fail a request; one that fetches gets FetchFailed and continues without that KV."""
        request_id = request.spec.request_id
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
