"""Remote prefill: a credit, blocks, the prefill worker's first token, its KV."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    Fetch,
    FetchFailed,
    PrefillDone,
    ReceiveDone,
    ReceiveFailed,
    ReceiveReady,
    ReceiveRefused,
    Submit,
)
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM, RequestSpec, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.prefill_watchdog import NoProgressError, PrefillWatchdog, watch
from pdcluster_worker.serving.decode.prefix_push import push_prefix
from pdcluster_worker.serving.engines.client import (
    ENGINE_STALLED,
    EngineDiedError,
    EngineStalledError,
)
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.engines.stall_watch import period_seconds
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import add_event, trace_decoding, trace_migration

logger = logging.getLogger(__name__)

Reply = Token | PrefillDone
"""Reply of a prefill worker."""


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
        self,
        place: RequestHandle,
        spec: RequestSpec,
        hashes: list[bytes],
        *,
        forced: bool = False,
        only: Peer | None = None,
        holder: Peer | None = None,
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
        # 5. When all are acknowledged, our engine decodes on; a stock engine fetches the KV now.
        # 6. If the call fails or stalls, our engine computes the prompt, and keeps the first token.
        clock = asyncio.get_running_loop().time
        start = clock()
        reserved = await self._reserve(place, spec, hashes, only, holder)
        if reserved is None:
            if holder is None and not forced:
                self._worker.count_long_prompt(is_remote=False)
            self._prefill_locally(place, spec, forced=forced, waited=clock() - start)
            return
        first: Token | None = None
        done = False
        outcome = "cancelled"  # unless the code below gets further
        try:
            if reserved.has_credit:
                await self._push_prefix(place, reserved, spec)
            target = place.target(reserved.blocks)
            call = reserved.peer.prefill(aged(spec, reserved.waited_seconds), target)
            async with aclosing(call) as replies:
                while (reply := await self._next(place, replies, reserved.peer)) is not None:
                    if isinstance(reply, PrefillDone):
                        done = True
                        self._finish(place, reserved, first, reply)
                        continue
                    first = self._first(reserved, spec, reply)
                    if first.finish_reason is not None:  # it moves no KV: this is all
                        done, outcome = True, "ok"
                    yield Generated(first, "remote")
            if not done:
                raise PeerError("the call ended before the KV was acknowledged")
            if first is None:
                yield Generated(await self._fetched(place, reserved), "remote")
            outcome = "ok"
        except (EngineDiedError, EngineStalledError):
            raise  # of this worker: nothing is left to prefill with
        except (PeerError, RequestError) as e:
            outcome = "stalled" if _is_stall(e) else "failed"
            self._recover(place, reserved, first, e, forced=forced)
        finally:
            self._count(reserved, spec.request_id, outcome)

    def _prefill_locally(
        self, place: RequestHandle, spec: RequestSpec, *, forced: bool, waited: float
    ) -> None:
        if forced:
            raise RequestError(
                'no prefill worker is ready, and pdcluster.prefill is "remote"',
                status=503,
                code="no_prefill_worker",
            )
        place.send(Submit(aged(spec, waited)))

    def _recover(
        self,
        place: RequestHandle,
        reserved: _Reserved,
        first: Token | None,
        error: PeerError | RequestError,
        *,
        forced: bool,
    ) -> None:
        """Let our engine prefill; raises if a remote prefill is forced, or our own fails too."""
        request_id, outcome = place.mailbox.request_id, "stalled" if _is_stall(error) else "failed"
        logger.warning(
            "remote prefill failed request=%s peer=%s reason=%s",
            request_id,
            reserved.peer.key,
            error,
        )
        add_event("prefill_failed", peer=reserved.peer.key, outcome=outcome)
        if isinstance(error, RequestError) and error.param == CONSTRAINT_PARAM:
            raise error  # it cannot be compiled here either
        if forced and first is None:
            message = f'the prefill worker failed, and pdcluster.prefill is "remote": {error}'
            raise RequestError(message, status=503, code="prefill_failed") from error
        place.send(ReceiveFailed(request_id, reserved.blocks.epoch, first))

    def _first(self, reserved: _Reserved, spec: RequestSpec, first: Token) -> Token:
        """Note its prefill's pace, and that it waited for a credit."""
        num_tokens = len(spec.prompt) + len(spec.output) - first.cached_tokens
        self._worker.prefill_rates.add(reserved.peer.key, num_tokens, first.prefill_seconds or 0.0)
        return _waited(first, reserved.waited_seconds)

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
        self, place: RequestHandle, reserved: _Reserved, spec: RequestSpec
    ) -> None:
        """Give the prefill worker KV that it lacks; one that makes no progress goes without."""
        with suppress(NoProgressError):
            async with watch(self._check_of(place, reserved.peer), self._period):
                await push_prefix(self._worker, place, reserved.peer, spec, reserved.blocks)

    async def _next(
        self, place: RequestHandle, replies: AsyncGenerator[Reply, None], peer: Peer
    ) -> Reply | None:
        """The next reply, None at the end.  Raises NoProgressError, EngineDiedError."""
        async with watch(self._check_of(place, peer), self._period):
            return await anext(replies, None)

    def _check_of(self, place: RequestHandle, peer: Peer) -> Callable[[], None]:
        watchdog = PrefillWatchdog(asyncio.get_running_loop().time, lambda: peer.load)

        def check() -> None:
            place.check()
            watchdog.check(self._worker.policy.stall_seconds)

        return check

    def _period(self) -> float:
        return period_seconds(self._worker.policy.stall_seconds)

    def _finish(
        self, place: RequestHandle, reserved: _Reserved, first: Token | None, done: PrefillDone
    ) -> None:
        if done.handle:
            place.send(Fetch(place.mailbox.request_id, reserved.blocks.epoch, done.handle))
            return
        if first is None:
            raise PeerError("the KV came without a first token")
        metrics = self._worker.metrics
        self._worker.pair_rates.add(reserved.peer.key, done.num_bytes, done.busy_seconds)
        self._worker.note_transport(done.transport, done.transport_note)
        metrics.kv_transfer_seconds.observe(done.seconds)
        metrics.ttft_phase_seconds.labels("transfer").observe(done.seconds)
        trace_migration(done)
        trace_decoding("begin")
        place.send(
            ReceiveDone(place.mailbox.request_id, reserved.blocks.epoch, first, done.checksum)
        )

    async def _fetched(self, place: RequestHandle, reserved: _Reserved) -> Token:
        """The first token, made here from fetched KV.  Raises PeerError."""
        clock = asyncio.get_running_loop().time
        start = clock()
        async with watch(place.check, self._period):
            output = await place.mailbox.get()
        if isinstance(output, FetchFailed):
            raise PeerError(f"the KV did not come: {output.reason}")
        if not isinstance(output, Token):
            raise RequestError(f"the engine answered {type(output).__name__} to Fetch", status=500)
        seconds = clock() - start
        self._worker.metrics.kv_transfer_seconds.observe(seconds)
        self._worker.metrics.ttft_phase_seconds.labels("transfer").observe(seconds)
        return _waited(output, reserved.waited_seconds)

    async def _reserve(
        self,
        place: RequestHandle,
        spec: RequestSpec,
        hashes: list[bytes],
        only: Peer | None,
        holder: Peer | None,
    ) -> _Reserved | None:
        """Blocks, and before them a credit, so that a waiting request holds none."""
        if holder is not None:
            return await self._reserve_for(place, spec, holder)
        clock = asyncio.get_running_loop().time
        num_tokens = len(spec.prompt) + len(spec.output)
        start = clock()
        named = "" if only is None else only.key
        self._worker.credit_queue.add(spec.request_id, num_tokens, spec.priority, named)
        outcome = "cancelled"
        try:
            async with watch(place.check, self._period):
                while (
                    peer := await self._broker.acquire(
                        spec.request_id, num_tokens, spec.priority, hashes, only=only
                    )
                ) is not None:
                    blocks = await self._receive(place, aged(spec, clock() - start), peer)
                    if isinstance(blocks, ReceiveReady):
                        waited = clock() - start
                        add_event("credit", peer=peer.key, waited_seconds=waited)
                        self._worker.metrics.credit_wait_seconds.observe(waited)
                        outcome = "granted"
                        return _Reserved(peer, blocks, waited)
                    add_event("no_blocks", needed=blocks.needed_blocks)
                    await self._worker.wait_for_blocks(
                        place.engine, spec.request_id, blocks.needed_blocks
                    )
            outcome = "no_prefill_worker"
            add_event("credit", peer="", waited_seconds=clock() - start)
            return None
        finally:
            self._worker.metrics.credit_requests.labels(outcome).inc()
            self._worker.credit_queue.discard(spec.request_id)
            self._broker.request_credits()

    async def _reserve_for(
        self, place: RequestHandle, spec: RequestSpec, holder: Peer
    ) -> _Reserved | None:
        async with watch(place.check, self._period):
            blocks = await self._receive(place, spec)
        if isinstance(blocks, ReceiveRefused):
            return None
        add_event("reads_kv", peer=holder.key)
        return _Reserved(holder, blocks, waited_seconds=0.0, has_credit=False)

    async def _receive(
        self, place: RequestHandle, spec: RequestSpec, granting: Peer | None = None
    ) -> ReceiveReady | ReceiveRefused:
        """Request blocks; without them the credit goes back to `granting`."""
        answer = None
        try:
            answer = await place.receive(spec)
        finally:
            if granting is not None and not isinstance(answer, ReceiveReady):
                granting.release(spec.request_id)
        return answer


def _is_stall(error: PeerError | RequestError) -> bool:
    """Return whether a peer failed because it stalls, by its own report or by our patience."""
    return isinstance(error, NoProgressError) or (
        isinstance(error, RequestError) and error.code == ENGINE_STALLED
    )


def _waited(first: Token, seconds: float) -> Token:
    """A first token with so many seconds more in the queue."""
    return msgspec.structs.replace(first, queue_seconds=(first.queue_seconds or 0.0) + seconds)
