"""Runs the attempts of a choice, one after another, and decides what follows a failed one."""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import (
    MigrationOutcome,
    MigrationReason,
    has_capacity,
    may_migrate,
)
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.engines.client import EngineDiedError
from pdcluster_worker.serving.ingress.attempt import (
    Attempt,
    AttemptCancelledError,
    Hedge,
    RequestProgress,
    is_engines,
    reason_of,
    run_hedged,
)
from pdcluster_worker.serving.ingress.decode_router import LOCAL, DecodeRouter, key_of, name_of
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Mapped, Reader, Stream
from pdcluster_worker.tracing.request_trace import add_event

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AttemptRoute:
    """Start of the choices of one prompt."""

    # The worker of the last attempt that began, where the prompt is cached; None = this one.
    where: Peer | None
    may_run_locally: bool  # a drain that begins later lets the request go on
    reader: Reader[Generated] | None  # see `Ingress.generate`
    # That the first choice runs, of `where` and another worker; None = there is none.
    hedge: Hedge | None = None
    kv_holder: str = ""  # pod that has the prompt's KV, where that is another worker


class Migration:
    """One per ingress.  decodes: peers that take new work."""

    def __init__(
        self,
        worker: WorkerContext,
        local: DecodeDispatcher,
        decodes: Callable[[], list[Peer]],
        router: DecodeRouter,
    ) -> None:
        self._worker = worker
        self._local = local
        self._decodes = decodes
        self._router = router
        self._at_peers: set[Attempt] = set()

    def on_change(self) -> None:
        for attempt in tuple(self._at_peers):
            if attempt.peer.is_draining and self._may_leave(attempt.progress, attempt.peer):
                attempt.cancel()

    def _may_leave(self, progress: RequestProgress, peer: Peer) -> bool:
        if not may_migrate(self._worker.policy.moving, progress.num_moves):
            return False
        if self._is_bound(progress, peer):
            return False
        spec = progress.spec
        others = [
            peer
            for peer in self._decodes()
            if peer.key not in progress.failed and spec.runs_with(peer.load.adapters)
        ]
        return self._worker.takes(spec) or bool(others)

    def _is_bound(self, progress: RequestProgress, where: Peer | None) -> bool:
        """Return whether no other worker can go on: its grammar would begin again."""
        if progress.spec.sampling.constraint is None or not progress.has_begun:
            return False
        facts = self._worker.engine_ready if where is None else where
        return facts.restarts_grammar

    async def run(
        self, progress: RequestProgress, route: AttemptRoute
    ) -> AsyncGenerator[Generated, None]:
        """All tokens of one choice, on as many workers as it takes.  Raises RequestError."""
        where = route.where
        while True:
            hedge, route.hedge = route.hedge, None
            attempt = self._begin(progress, where, hedge, route.reader)
            try:
                async with aclosing(attempt):
                    async for generated in attempt:
                        if hedge is not None:
                            route.where = hedge.where
                        if progress.moves_for is not None:
                            self._count(progress.moves_for, "moved")
                            progress.moves_for = None
                        yield progress.take(generated)
                return
            except (PeerError, RequestError) as e:
                if progress.is_over:
                    return  # the client has all of it
                error = e
            if hedge is not None:
                where = hedge.where
                progress.failed |= hedge.failed
            where = route.where = self._next_worker(progress, route, where, error)

    def _begin(
        self,
        progress: RequestProgress,
        where: Peer | None,
        hedge: Hedge | None,
        reader: Reader[Generated] | None,
    ) -> Stream[Generated]:
        """Begin an attempt; with a hedge both of its attempts, of which one goes on."""
        if hedge is not None:
            attempts = [self._begin(progress, worker, None, None) for worker in hedge.workers]
            return run_hedged(self._worker.metrics, hedge, progress, attempts)
        if where is not None:
            return Attempt(progress, where, self._at_peers)
        is_first = progress.num_attempts == 0
        pushed = Mapped(progress.take, reader) if reader is not None and is_first else None
        return self._local.run(*progress.next_attempt(), pushed)

    def _next_worker(
        self,
        progress: RequestProgress,
        route: AttemptRoute,
        where: Peer | None,
        error: PeerError | RequestError,
    ) -> Peer | None:
        """The worker of the next attempt; None is this one.  Raises RequestError."""
        reason = reason_of(error)
        if reason is None or (where is None and not is_engines(error)):
            raise error
        was_local = LOCAL in progress.failed
        if isinstance(error, AttemptCancelledError) or reason == "preempted":
            progress.left = [where]
        else:
            progress.failed.add(key_of(where))
        logger.warning(
            "attempt ended early request=%s at=%s tokens=%d reason=%s",
            *(progress.spec.request_id, name_of(where), len(progress.output), error),
        )
        if progress.has_begun:
            target = self._move(progress, where, reason, error)
            if isinstance(error, AttemptCancelledError) and where is not None:
                progress.kv_holder = where.key
        else:
            may_be_local = not was_local and (where is None or route.may_run_locally)
            full = self._full(progress, where) if reason == "preempted" else frozenset()
            target = self._again(progress, error, may_be_local, full)
        _trace(progress, reason, where, target)
        return target

    def _again(
        self,
        progress: RequestProgress,
        error: PeerError | RequestError,
        may_be_local: bool,
        full: frozenset[str],
    ) -> Peer | None:
        """Another try: the client has seen nothing.  full: workers without room for it."""
        if isinstance(error, EngineDiedError):
            raise error  # a request that kills its engine kills one
        may_be_local = may_be_local or (
            self._worker.takes(progress.spec) and LOCAL not in progress.failed
        )
        if may_be_local and LOCAL not in full and self._worker.engines.problem is None:
            return None
        peer = self._choose(progress, may_be_local=False, full=full)
        if peer is not None:
            return peer
        if last := self._last_resort(progress):
            return last[0]
        raise error if isinstance(error, RequestError) else self._worker.refusal() from error

    def _move(
        self,
        progress: RequestProgress,
        where: Peer | None,
        reason: MigrationReason,
        error: PeerError | RequestError,
    ) -> Peer | None:
        if where is None and isinstance(error, EngineDiedError) and self._worker.engines.problem:
            raise error  # this process is about to end
        if self._is_bound(progress, where):
            self._count(reason, "refused")
            raise _lost(where, error, _BOUND) from error
        reason = progress.moves_for or reason
        is_allowed = may_migrate(self._worker.policy.moving, progress.num_moves)
        full = self._full(progress, where) if reason == "preempted" else frozenset()
        may_be_local = is_allowed and self._worker.takes(progress.spec) and LOCAL not in full
        target = self._choose(progress, may_be_local, full) if is_allowed else None
        if target is not None or may_be_local:
            progress.moves_for = reason
        else:
            self._count(reason, "nowhere" if is_allowed else "refused")
            last = self._last_resort(progress)
            if not last and not (is_allowed and self._is_up(progress)):
                raise _lost(where, error) from error
            target = last[0] if last else None
        progress.num_moves += 1
        return target

    def _full(self, progress: RequestProgress, where: Peer | None) -> frozenset[str]:
        needed = self._worker.num_blocks(progress.spec.num_tokens + len(progress.output))
        peers = [
            peer for peer in self._decodes() if not has_capacity(peer.load.free_blocks, needed)
        ]
        local = [] if has_capacity(self._worker.load().free_blocks, needed) else [LOCAL]
        return frozenset([*(peer.key for peer in peers), *local, key_of(where)])

    def _choose(
        self, progress: RequestProgress, may_be_local: bool, full: frozenset[str] = frozenset()
    ) -> Peer | None:
        try:
            return self._router.choose(progress.so_far(), may_be_local, progress.failed, full)
        except RequestError as e:  # it names its worker
            logger.warning("stays request=%s reason=%s", progress.spec.request_id, e)
            return None

    def _last_resort(self, progress: RequestProgress) -> list[Peer | None]:
        """The worker that it was taken from, while that would go on with it; or none."""
        return [left for left in progress.left if self._would_go_on(progress, left)]

    def _would_go_on(self, progress: RequestProgress, left: Peer | None) -> bool:
        if left is None:
            return LOCAL not in progress.failed and self._is_up(progress)
        return left.key not in progress.failed and (left.is_draining or left in self._decodes())

    def _is_up(self, progress: RequestProgress) -> bool:
        is_up = self._worker.engines.problem is None and not self._worker.has_ended
        return is_up and (LOCAL not in progress.failed or len(self._worker.engines) > 1)

    def _count(self, reason: MigrationReason, outcome: MigrationOutcome) -> None:
        self._worker.metrics.request_moves.labels(reason, outcome).inc()


_BOUND = (
    "; a structured answer that has begun cannot go on at another worker with this type of engine: "
    "send the request again"
)


def _lost(where: Peer | None, error: PeerError | RequestError, advice: str = "") -> RequestError:
    if where is None and isinstance(error, RequestError):
        return error
    message = f"the decode worker of this request was lost: {error}{advice}"
    return RequestError(message, status=503, code="decode_worker_lost")


def _trace(
    progress: RequestProgress, reason: MigrationReason, left: Peer | None, goes_to: Peer | None
) -> None:
    name = "move" if progress.has_begun else "again"
    facts = {"reason": reason, "left": name_of(left), "goes_to": name_of(goes_to)}
    add_event(name, tokens=len(progress.output), moves=progress.num_moves, **facts)
