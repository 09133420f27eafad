"""Remote prefill: a credit, blocks, the prefill worker's first token, its KV."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    Fetch,
    FetchFailed,
    Prefill,
    PrefillDone,
    ReceiveDone,
    ReceiveFailed,
    ReceiveReady,
    ReceiveRefused,
    Submit,
)
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import (
    CONSTRAINT_PARAM,
    RequestSpec,
    SamplingParams,
    Token,
    TransferTarget,
)
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import pushes_prefix
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.offload_decider import DecodeRequest
from pdcluster_worker.serving.engines.client import (
    ENGINE_STALLED,
    EngineDiedError,
    EngineStalledError,
)
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.engines.stall_watch import (
    NoProgressError,
    PrefillWatchdog,
    period_seconds,
    watch,
)
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import add_event, trace_decoding, trace_migration

logger = logging.getLogger(__name__)

_TWO_TOKENS = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
"""With the first a prefix's KV is sent; with the second it is in the other engine's cache."""

REFETCH_SECONDS = 10.0
"""Age of KV that is fetched again after a failure: vLLM gives a handshake 5 s, which a busy machine
may not have, and its peer keeps KV for 30 s.
"""


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A prefill worker that has room, our blocks, and how long both took."""

    peer: Peer
    blocks: ReceiveReady
    waited_seconds: float
    has_credit: bool = True  # of that worker, to give back; False where a worker hands over KV


class RemotePrefill:
    """Prefills elsewhere; one per decode worker."""

    def __init__(self, worker: WorkerContext, broker: CreditBroker) -> None:
        self._worker = worker
        self._broker = broker

    async def first_token(
        self, request: DecodeRequest, *, only: Peer | None = None, holder: Peer | None = None
    ) -> AsyncGenerator[Generated, None]:
        """The first token, if another worker made it; nothing when the prefill will be local.

        only:   the prefill worker; None = the best.
        holder: the worker that the request left, which has its KV: it needs no credit.
        Raises RequestError 503 if the prefill would be local although the client forced `remote`.
        """
        # 1. Reserve a credit of a prefill worker (a holder needs none) and blocks of our engine.
        # 2. Without a prefill worker our engine computes the prompt, and nothing is yielded.
        # 3. Push the prefix that our engine has and the prefill worker lacks; not to a holder.
        # 4. Call `Prefill` there.  Its first token is yielded at once, while blocks still come.
        # 5. When all are acknowledged, our engine decodes on; a stock engine fetches the KV now,
        #    and once more if that fails early.
        # 6. If the call fails or stalls, our engine computes the prompt, and keeps the first token.
        forced = holder is None and request.prefill == "remote"
        spec, handle = request.spec, request.handle
        start = asyncio.get_running_loop().time()
        reserve = (
            self._reserve(request, only) if holder is None else self._take_over(request, holder)
        )
        if (reserved := await reserve) is None:
            if forced:
                message = 'no prefill worker is ready, and pdcluster.prefill is "remote"'
                raise RequestError(message, status=503, code="no_prefill_worker")
            if holder is None:
                self._worker.count_long_prompt(is_remote=False)
            handle.send(Submit(aged(spec, asyncio.get_running_loop().time() - start)))
            return
        peer, first, done, kv = reserved.peer, None, False, b""
        outcome = "cancelled"  # unless the code below gets further
        try:
            if reserved.has_credit:
                await self._push_prefix(handle, reserved, spec)
            call = peer.prefill(aged(spec, reserved.waited_seconds), handle.target(reserved.blocks))
            async with aclosing(call) as replies:
                while (reply := await self._next(handle, replies, peer)) is not None:
                    if isinstance(reply, PrefillDone):
                        done, kv = True, reply.handle
                        self._finish(handle, reserved, first, reply)
                        self._measure(reserved, spec, reply.busy_seconds)
                        continue
                    first = self._first(reserved, spec, reply)
                    if first.finish_reason is not None:  # it moves no KV: this is all
                        done, outcome = True, "ok"
                    yield Generated(first, "remote")
            if not done:
                raise PeerError("the call ended before the KV was acknowledged")
            if first is None:
                yield Generated(await self._fetched(handle, reserved, spec, kv), "remote")
            outcome = "ok"
        except (EngineDiedError, EngineStalledError):
            raise  # of this worker: nothing is left to prefill with
        except (PeerError, RequestError) as e:
            outcome = "stalled" if _is_stall(e) else "failed"
            add_event("prefill_failed", peer=peer.key, outcome=outcome)
            self._recover(handle, reserved, first, e, forced=forced)
        finally:
            self._count(reserved, spec.request_id, outcome)

    def _recover(
        self,
        handle: RequestHandle,
        reserved: _Reserved,
        first: Token | None,
        error: PeerError | RequestError,
        *,
        forced: bool,
    ) -> None:
        """Let our engine prefill; raises if a remote prefill is forced, or our own fails too."""
        request_id = handle.outputs.request_id
        logger.warning(
            "remote prefill failed request=%s peer=%s reason=%s",
            *(request_id, reserved.peer.key, error),
        )
        if isinstance(error, RequestError) and error.param == CONSTRAINT_PARAM:
            raise error  # it cannot be compiled here either
        if forced and first is None:
            message = f'the prefill worker failed, and pdcluster.prefill is "remote": {error}'
            raise RequestError(message, status=503, code="prefill_failed") from error
        handle.send(ReceiveFailed(request_id, reserved.blocks.epoch, first))

    def _count(self, reserved: _Reserved, request_id: str, outcome: str) -> None:
        metrics = self._worker.metrics
        if not reserved.has_credit:
            metrics.kv_handovers.labels(outcome).inc()
            return
        metrics.remote_prefill.labels(outcome).inc()
        if outcome != "cancelled":
            self._worker.count_long_prompt(is_remote=outcome == "ok")
        if outcome != "ok":
            reserved.peer.release(request_id)  # in case the call never began

    async def _push_prefix(
        self, handle: RequestHandle, reserved: _Reserved, spec: RequestSpec
    ) -> None:
        with suppress(NoProgressError):  # one that makes no progress goes without
            async with self._watching(handle, reserved.peer):
                await push_prefix(self._worker, handle, reserved.peer, spec, reserved.blocks)

    def _first(self, reserved: _Reserved, spec: RequestSpec, first: Token) -> Token:
        num_tokens, seconds = spec.num_tokens - first.cached_tokens, first.prefill_seconds or 0.0
        self._worker.prefill_rates.add(reserved.peer.key, num_tokens, seconds)
        return first.waited(reserved.waited_seconds)

    async def _next(
        self,
        handle: RequestHandle,
        replies: AsyncGenerator[Token | PrefillDone, None],
        peer: Peer,
    ) -> Token | PrefillDone | None:
        """The next reply, None at the end.  Raises NoProgressError, EngineDiedError."""
        async with self._watching(handle, peer):
            return await anext(replies, None)

    def _watching(
        self, handle: RequestHandle, peer: Peer | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Raise in the block when our engine fails, or the peer makes no progress."""
        clock = asyncio.get_running_loop().time
        watchdog = None if peer is None else PrefillWatchdog(clock, lambda: peer.load)

        def check() -> None:
            handle.check()
            if watchdog is not None:
                watchdog.check(self._worker.policy.stall_seconds)

        return watch(check, lambda: period_seconds(self._worker.policy.stall_seconds))

    def _finish(
        self, handle: RequestHandle, reserved: _Reserved, first: Token | None, done: PrefillDone
    ) -> None:
        request_id, epoch = handle.outputs.request_id, reserved.blocks.epoch
        if done.handle:
            handle.send(Fetch(request_id, epoch, done.handle))
            return
        if first is None:
            raise PeerError("the KV came without a first token")
        self._worker.note_transport(done.transport, done.transport_note)
        self._observe_transfer(done.seconds)
        trace_migration(done)
        trace_decoding("begin")
        handle.send(ReceiveDone(request_id, epoch, first, done.checksum))

    def _measure(self, reserved: _Reserved, spec: RequestSpec, seconds: float) -> None:
        num_tokens = spec.num_tokens - reserved.blocks.cached_tokens
        self._worker.pair_rates.add(reserved.peer.key, num_tokens, seconds)

    async def _fetched(
        self, handle: RequestHandle, reserved: _Reserved, spec: RequestSpec, kv: bytes
    ) -> Token:
        """The first token, made here from fetched KV.  Raises PeerError."""
        peer, clock = reserved.peer, asyncio.get_running_loop().time
        start = clock()
        output = await handle.outputs.get()
        is_early = clock() - start < REFETCH_SECONDS and peer.state == "ready"
        if isinstance(output, FetchFailed) and is_early and _has_one_reader(handle, peer):
            logger.warning(
                "fetching KV again request=%s peer=%s reason=%s",
                *(spec.request_id, peer.key, output.reason),
            )
            add_event("fetches_again", peer=peer.key)
            handle.send(Fetch(spec.request_id, reserved.blocks.epoch, kv))
            output = await handle.outputs.get()
        if isinstance(output, FetchFailed):
            raise PeerError(f"the KV did not come: {output.reason}")
        if not isinstance(output, Token):
            raise RequestError(f"the engine answered {type(output).__name__} to Fetch", status=500)
        seconds = clock() - start
        self._measure(reserved, spec, seconds)
        self._observe_transfer(seconds)
        return output.waited(reserved.waited_seconds)

    def _observe_transfer(self, seconds: float) -> None:
        self._worker.metrics.kv_transfer_seconds.observe(seconds)
        self._worker.metrics.ttft_phase_seconds.labels("transfer").observe(seconds)

    async def _reserve(self, request: DecodeRequest, only: Peer | None) -> _Reserved | None:
        """A credit and then blocks, so that a request that waits for a credit holds none."""
        spec, metrics, clock = request.spec, self._worker.metrics, asyncio.get_running_loop().time
        start, outcome = clock(), "cancelled"
        try:
            with self._broker.queued(spec, only):
                async with self._watching(request.handle):
                    reserved = await self._blocks_with_credit(request, only, start)
            outcome = "no_prefill_worker" if reserved is None else "granted"
        finally:
            metrics.credit_requests.labels(outcome).inc()
        waited = clock() - start if reserved is None else reserved.waited_seconds
        add_event("credit", peer=reserved.peer.key if reserved else "", waited_seconds=waited)
        if reserved is not None:
            metrics.credit_wait_seconds.observe(waited)
        return reserved

    async def _blocks_with_credit(
        self, request: DecodeRequest, only: Peer | None, start: float
    ) -> _Reserved | None:
        spec, handle, clock = request.spec, request.handle, asyncio.get_running_loop().time
        while (peer := await self._broker.acquire(spec, request.hashes, only)) is not None:
            blocks = None
            try:
                blocks = await handle.receive(aged(spec, clock() - start))
            finally:
                if not isinstance(blocks, ReceiveReady):
                    peer.release(spec.request_id)
            if isinstance(blocks, ReceiveReady):
                return _Reserved(peer, blocks, clock() - start)
            add_event("no_blocks", needed=blocks.needed_blocks)
            await self._worker.wait_for_blocks(handle.engine, spec.request_id, blocks.needed_blocks)
        return None

    async def _take_over(self, request: DecodeRequest, holder: Peer) -> _Reserved | None:
        blocks = await request.handle.receive(request.spec)
        if isinstance(blocks, ReceiveRefused):
            return None
        add_event("reads_kv", peer=holder.key)
        return _Reserved(holder, blocks, waited_seconds=0.0, has_credit=False)


async def push_prefix(
    worker: WorkerContext,
    handle: RequestHandle,
    peer: Peer,
    spec: RequestSpec,
    blocks: ReceiveReady,
) -> None:
    """Write to the peer what it lacks of the prefix that is cached here, if that is worth it."""
    lacking = blocks.cached_tokens - peer.prefix_match(worker.hashes(spec)) * worker.block_size
    has_kv_port = bool(handle.engine.kv_addresses)  # a stock engine has none of ours
    transfer_seconds = worker.transfer_seconds(peer.key, lacking)
    compute_seconds = worker.prefill_rates.seconds(peer.key, lacking)
    is_worth_it = pushes_prefix(lacking, transfer_seconds, compute_seconds)
    if not has_kv_port or spec.verify_transfer or not is_worth_it:
        return
    prefix = replace(
        spec,
        request_id=f"{spec.request_id}~prefix",
        prompt=[*spec.prompt, *spec.output][: blocks.cached_tokens],
        output=[],
        sampling=_TWO_TOKENS,
    )
    outcome = "failed"
    try:
        is_taken = await peer.push(
            prefix, lambda target: _push_blocks(worker, handle, prefix, target)
        )
        outcome = "ok" if is_taken else "refused"
    except (PeerError, RequestError) as e:
        logger.warning(
            "prefix was not given request=%s peer=%s reason=%s", spec.request_id, peer.key, e
        )
    finally:
        worker.metrics.kv_prefixes_given.labels(outcome).inc()
        add_event("gives_prefix", peer=peer.key, tokens=lacking, outcome=outcome)


async def _push_blocks(
    worker: WorkerContext, handle: RequestHandle, prefix: RequestSpec, target: TransferTarget
) -> tuple[Token, PrefillDone]:
    """Write it by the engine that holds it: a prefill whose blocks are all cached but the last."""
    own = RequestHandle(handle.engine, handle.engine.client.open(prefix.request_id))
    try:
        own.send(Prefill(prefix, target))
        first, done = await own.outputs.get(), await own.outputs.get()
    finally:
        own.close()
    if not isinstance(first, Token) or not isinstance(done, PrefillDone):
        raise RequestError("the engine did not write the prefix", status=500)
    worker.note_transfer(done)
    return first, done


def _has_one_reader(handle: RequestHandle, peer: Peer) -> bool:
    """Return whether KV goes from one rank to one.  Of several some may have read: vLLM counts them
    once more when they read again, and so frees blocks that another still reads.
    """
    devices = handle.engine.facts.device, peer.record.device
    return all(
        device is not None and device.tensor_parallel_size * device.pipeline_parallel_size == 1
        for device in devices
    )


def _is_stall(error: PeerError | RequestError) -> bool:
    """Return whether a peer failed because it stalls, by its own report or by our patience."""
    return isinstance(error, NoProgressError) or (
        isinstance(error, RequestError) and error.code == ENGINE_STALLED
    )
