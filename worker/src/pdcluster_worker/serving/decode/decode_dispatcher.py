"""One request on its decode worker: decide where to prefill, then stream the engine's tokens."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import has_capacity, is_short_of_blocks
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.admission_control import AdmissionControl, AdmittedRequest
from pdcluster_worker.serving.decode.offload_decider import OffloadDecider, RequestTimer
from pdcluster_worker.serving.decode.remote_prefill import RemotePrefill
from pdcluster_worker.serving.engines.client import RequestOutputs, ShortOfBlocksError
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.estimation import TrackedRequest
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Mapped, Reader
from pdcluster_worker.tracing.request_trace import add_event, trace_decoding, trace_first_token


@dataclass(slots=True)
class _DecodeRequest:
    """One request at its engine.  has_begun: it has its first token; has_ended: its last one."""

    spec: RequestSpec
    prefill: PrefillMode
    place: RequestHandle
    pace: RequestTimer
    tracked: TrackedRequest
    reader: Reader[Token] | None = None  # of the tokens between them
    waited_seconds: float = 0.0  # for KV that others brought
    has_begun: bool = False
    has_ended: bool = False


class DecodeDispatcher:
    """Runs requests here, for HTTP and for `Generate` of peers.  holder: by pod."""

    def __init__(
        self,
        worker: WorkerContext,
        remote: RemotePrefill,
        prefills: Callable[[], list[Peer]],
        decodes: Callable[[], list[Peer]],
        holder: Callable[[str], Peer | None] = lambda _: None,
    ) -> None:
        self._worker = worker
        self._remote = remote
        self._prefills = prefills
        self._decodes = decodes
        self._holder = holder
        self._offloading = OffloadDecider(worker, prefills, decodes)
        self._quality = AdmissionControl(worker)
        self._num_decoding = 0  # past their first token

    @property
    def num_requests(self) -> int:
        return self._quality.num_waiting + self._num_decoding

    def admit(self, specs: Sequence[RequestSpec]) -> None:
        """Raise RequestError when a prompt with all its choices is not taken now."""
        self._quality.admit(specs)

    async def run(
        self, spec: RequestSpec, prefill: PrefillMode, reader: Reader[Generated] | None = None
    ) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens, but for those that `reader` takes; never the first nor last.

        Raises RequestError.  The caller calls `admit` first, once for all choices of a prompt.
        """
        terms: AdmittedRequest | None = self._quality.terms(spec, prefill)
        while terms is not None:
            with self._quality.turn(terms) as turn, self._running(terms, reader) as request:
                async with aclosing(self._first_tokens(request)) as firsts:
                    generated = await self._quality.first(turn, firsts)
                    while generated is not None:
                        yield self._noted(request, generated)
                        generated = await anext(firsts, None)
                while turn.has_started and not request.has_ended:
                    token = await request.place.mailbox.token(request.reader)
                    yield self._noted(request, Generated(token))
            terms = None if turn.has_started else self._quality.demoted(terms)

    @contextmanager
    def _running(
        self, terms: AdmittedRequest, reader: Reader[Generated] | None
    ) -> Iterator[_DecodeRequest]:
        """Give it a place at an engine, until it ends or is closed."""
        spec = terms.spec
        with self._worker.estimation.tracking(spec) as tracked:
            place = self._worker.engines.open(spec.request_id, lambda: self._worker.hashes(spec))
            place.mailbox.on_preempted = partial(self._short_of_blocks, place.mailbox, spec)
            pace = self._offloading.pace(spec.request_id, len(spec.prompt) + len(spec.output))
            request = _DecodeRequest(spec, terms.prefill, place, pace, tracked)
            if reader is not None:
                request.reader = Mapped(
                    lambda token: self._noted(request, Generated(token)), reader
                )
            try:
                yield request
            finally:
                request.reader = None  # it holds the request: no cycle is left
                if request.has_begun:
                    self._num_decoding -= 1
                pace.ended()
                self._offloading.prefixes.ended(spec.request_id)
                place.close()

    def _noted(self, request: _DecodeRequest, generated: Generated) -> Generated:
        if request.has_begun:
            self._quality.token()
        else:
            request.has_begun = True
            generated = _queued(generated, request.waited_seconds)
            trace_first_token(generated)
            self._num_decoding += 1
        token = generated.token
        request.pace.token(generated)
        if token.finish_reason is not None:
            request.has_ended = True
            trace_decoding("end", reason=token.finish_reason)
        request.tracked.token(token)
        return generated

    def _short_of_blocks(self, mailbox: RequestOutputs, spec: RequestSpec) -> RequestError | None:
        """Error that ends a request that was just preempted; None = it waits for blocks."""
        if not is_short_of_blocks(self._worker.policy.moving, mailbox.num_preemptions):
            return None
        num_tokens = len(spec.prompt) + len(spec.output) + mailbox.num_tokens
        needed = self._worker.num_blocks(num_tokens)
        if not any(has_capacity(peer.load.free_blocks, needed) for peer in self._decodes()):
            return None
        return ShortOfBlocksError(mailbox.num_preemptions)

    async def _first_tokens(self, request: _DecodeRequest) -> AsyncGenerator[Generated, None]:
        place, prefixes = request.place, self._offloading.prefixes
        elsewhere = await self._elsewhere(request)
        if elsewhere is None:
            request.pace.sent("local")
            place.send(Submit(request.spec))
            yield Generated(await place.mailbox.token(), "local")
            return
        started = False
        async with aclosing(elsewhere) as first:
            async for generated in first:
                started = True
                yield generated
                if generated.token.finish_reason is not None:
                    return
        if started:
            step = await self._first_step(place.mailbox)
            prefixes.arrived(request.spec.request_id)
            yield Generated(step)
        else:
            prefixes.arrived(request.spec.request_id)
            yield Generated(await place.mailbox.token(), "local")

    async def _elsewhere(self, request: _DecodeRequest) -> AsyncGenerator[Generated, None] | None:
        """The first token as another worker makes it; None = the prompt is computed here."""
        place, prefill, pace = request.place, request.prefill, request.pace
        offloading, spec = self._offloading, request.spec
        holder = self._holder(spec.kv_holder)
        hashes = [] if prefill == "local" and holder is None else self._worker.hashes(spec)
        if holder is not None and offloading.reads_kv(place, spec, hashes, holder):
            pace.side = None
            offloading.prefixes.begin(place, spec, hashes, is_local=False)
            return self._remote.first_token(place, spec, hashes, holder=holder)
        if (named := self._named(spec, prefill)) is not None:
            # it waits in that worker's line, and none should wait with it
            pace.sent("remote")
            return self._remote.first_token(
                place, spec, hashes, forced=prefill == "remote", only=named
            )
        if prefill == "auto":
            request.waited_seconds = await offloading.prefix(
                place, spec, hashes, lambda: self._num_decoding
            )
            request.spec = spec = aged(spec, request.waited_seconds)
            goes = offloading.goes(place, spec, hashes, self._num_decoding, pace)
            prefill = "remote" if goes else "local"
        offloading.prefixes.begin(place, spec, hashes, is_local=prefill == "local")
        if prefill == "local":
            return None
        pace.sent("remote")
        return self._remote.first_token(place, spec, hashes, forced=request.prefill == "remote")

    def _named(self, spec: RequestSpec, prefill: PrefillMode) -> Peer | None:
        """The prefill worker that the request names, if that is ready."""
        if not spec.prefiller or prefill == "local":
            return None
        found = [peer for peer in self._prefills() if peer.record.http_address == spec.prefiller]
        add_event("prefiller", address=spec.prefiller, known=bool(found))
        return found[0] if found else None

    async def _first_step(self, mailbox: RequestOutputs) -> Token:
        clock = asyncio.get_running_loop().time
        start = clock()
        token = await mailbox.token()
        self._worker.metrics.ttft_phase_seconds.labels("first_step").observe(clock() - start)
        add_event("first_step", seconds=clock() - start)
        return token


def _queued(generated: Generated, seconds: float) -> Generated:
    """A first token with so many seconds more in the queue."""
    if seconds <= 0:
        return generated
    token = generated.token
    late = structs.replace(token, queue_seconds=(token.queue_seconds or 0.0) + seconds)
    return structs.replace(generated, token=late)
