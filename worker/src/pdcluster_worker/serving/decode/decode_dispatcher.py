"""One request on its decode worker: decide where to prefill, then stream the engine's tokens."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial

from msgspec.structs import replace

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import Submit
from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import has_capacity, is_short_of_blocks
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.admission_control import AdmissionControl, AdmittedRequest
from pdcluster_worker.serving.decode.offload_decider import DecodeRequest, OffloadDecider
from pdcluster_worker.serving.decode.remote_prefill import RemotePrefill
from pdcluster_worker.serving.engines.client import RequestOutputs, ShortOfBlocksError
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Mapped, Reader
from pdcluster_worker.tracing.request_trace import add_event, trace_decoding, trace_first_token


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
        self._decider = OffloadDecider(worker, prefills, decodes)
        self._admission = AdmissionControl(worker)
        self._num_decoding = 0  # past their first token

    @property
    def num_requests(self) -> int:
        return self._admission.num_waiting + self._num_decoding

    def admit(self, specs: Sequence[RequestSpec]) -> None:
        """Raise RequestError when a prompt with all its choices is not taken now."""
        self._admission.admit(specs)

    async def run(
        self, spec: RequestSpec, prefill: PrefillMode, reader: Reader[Generated] | None = None
    ) -> AsyncGenerator[Generated, None]:
        """Yield the request's tokens, but for those that `reader` takes; never the first nor last.

        Raises RequestError.  The caller calls `admit` first, once for all choices of a prompt.
        """
        admitted: AdmittedRequest | None = self._admission.degraded(spec, prefill)
        while admitted is not None:
            with self._admission.queued(admitted) as slot, self._open(admitted, reader) as request:
                async with aclosing(self._first_tokens(request)) as firsts:
                    generated = await self._admission.first(slot, firsts)
                    while generated is not None:
                        yield self._noted(request, generated)
                        generated = await anext(firsts, None)
                while slot.has_started and not request.has_ended:
                    token = await request.handle.outputs.token(request.reader)
                    yield self._noted(request, Generated(token))
            admitted = None if slot.has_started else self._admission.demoted(admitted)

    @contextmanager
    def _open(
        self, admitted: AdmittedRequest, reader: Reader[Generated] | None
    ) -> Iterator[DecodeRequest]:
        """Choose an engine for it, until it ends or is closed."""
        spec = admitted.spec
        with self._worker.estimation.tracking(spec) as tracked:
            if self._worker.policy.estimation.late_groups != "Keep":
                spec = replace(spec, group=tracked.request.due_group)
            handle = self._worker.engines.open(
                spec.request_id, lambda: self._worker.hashes(spec), spec.num_tokens
            )
            handle.outputs.on_preempted = partial(self._short_of_blocks, handle.outputs, spec)
            timer = self._decider.timer(spec)
            request = DecodeRequest(spec, admitted.prefill, handle, timer, tracked)
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
                timer.ended()
                self._decider.prefixes.ended(spec.request_id)
                handle.close()

    def _noted(self, request: DecodeRequest, generated: Generated) -> Generated:
        if request.has_begun:
            self._admission.token()
        else:
            request.has_begun = True
            if request.waited_seconds > 0:
                token = generated.token.waited(request.waited_seconds)
                generated = replace(generated, token=token)
            trace_first_token(generated)
            self._worker.num_prefills[generated.prefill or "local"] += 1
            self._num_decoding += 1
        token = generated.token
        request.timer.token(generated)
        if token.finish_reason is not None:
            request.has_ended = True
            trace_decoding("end", reason=token.finish_reason)
        request.tracked.token(token)
        return generated

    def _short_of_blocks(self, outputs: RequestOutputs, spec: RequestSpec) -> RequestError | None:
        if not is_short_of_blocks(self._worker.policy.moving, outputs.num_preemptions):
            return None
        needed = self._worker.num_blocks(spec.num_tokens + outputs.num_tokens)
        if not any(has_capacity(peer.load.free_blocks, needed) for peer in self._decodes()):
            return None
        return ShortOfBlocksError(outputs.num_preemptions)

    async def _first_tokens(self, request: DecodeRequest) -> AsyncGenerator[Generated, None]:
        """The first token, made here or by a prefill worker; after that one's the next one too."""
        outputs, first = request.handle.outputs, None
        remote = await self._remote_prefill(request)
        if remote is None:
            request.timer.sent("local")
            request.handle.send(Submit(request.spec))
        else:
            async with aclosing(remote) as tokens:
                async for first in tokens:
                    yield first
                    if first.token.finish_reason is not None:
                        return
        if first is None:
            if remote is not None:  # it failed, and our engine computes the prompt
                self._decider.prefixes.arrived(request.spec.request_id)
            yield Generated(await outputs.token(), "local")
            return
        start = asyncio.get_running_loop().time()
        token = await outputs.token()
        seconds = asyncio.get_running_loop().time() - start
        self._worker.metrics.ttft_phase_seconds.labels("first_step").observe(seconds)
        add_event("first_step", seconds=seconds)
        self._decider.prefixes.arrived(request.spec.request_id)
        yield Generated(token)

    async def _remote_prefill(
        self, request: DecodeRequest
    ) -> AsyncGenerator[Generated, None] | None:
        """The first token as another worker makes it; None = the prompt is computed here."""
        # 1. A request that moved here reads its KV from the worker that it left.
        # 2. One that names a prefill worker waits in that worker's queue, and none waits with it.
        # 3. Else the policy decides, once KV on its way here that it may share has come.
        spec, timer, prefixes = request.spec, request.timer, self._decider.prefixes
        holder, prefill = self._holder(spec.kv_holder), request.prefill
        if prefill == "auto" and self._worker.role == "mixed":  # no cluster of it has another
            prefill = "local"
        if prefill != "local" or holder is not None:
            request.hashes = self._worker.hashes(spec)
        if holder is not None and self._decider.reads_kv(request, holder):
            timer.side = None
            prefixes.begin(request, is_local=False)
            return self._remote.first_token(request, holder=holder)
        named = None if prefill == "local" else self._named(spec.prefiller)
        if prefill == "auto" and named is None:
            request.waited_seconds = await self._decider.wait_for_prefix(
                request, lambda: self._num_decoding
            )
            request.spec = aged(spec, request.waited_seconds)
            prefill = "remote" if self._decider.goes(request, self._num_decoding) else "local"
        if named is None:
            prefixes.begin(request, is_local=prefill == "local")
            if prefill == "local":
                return None
        timer.sent("remote")
        return self._remote.first_token(request, only=named)

    def _named(self, address: str) -> Peer | None:
        if not address:
            return None
        found = [peer for peer in self._prefills() if peer.record.http_address == address]
        add_event("prefiller", address=address, known=bool(found))
        return found[0] if found else None
