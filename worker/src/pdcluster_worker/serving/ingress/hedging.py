"""Hedged requests: two attempts of one choice, of which the first token decides."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing import hedging
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.ingress.attempt import RequestProgress
from pdcluster_worker.serving.ingress.decode_router import LOCAL, key_of, name_of
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Merged, Stream
from pdcluster_worker.tracing.request_trace import add_event

HedgeItem = tuple[int, Generated | PeerError | RequestError]


@dataclass(slots=True)
class Hedge:
    """Two workers, None = this one."""

    entrants: tuple[Peer | None, Peer | None]
    ahead: int = 0  # the one whose attempt goes on, or ended last
    # Keys of those whose attempts ended before, while there was no token.
    failed: set[str] = field(default_factory=set)

    @property
    def where(self) -> Peer | None:
        return self.entrants[self.ahead]


class HedgePolicy:
    """Choose the requests that race; one per ingress.  decodes: peers that take new work."""

    def __init__(
        self, worker: WorkerContext, local: DecodeDispatcher, decodes: Callable[[], list[Peer]]
    ) -> None:
        self._worker = worker
        self._local = local
        self._decodes = decodes
        self._budget = hedging.HedgeBudget()

    def hedge(self, specs: Sequence[RequestSpec], first: Peer | None) -> Hedge | None:
        """The hedge of a prompt's first choice; None = it runs at `first` alone."""
        policy = self._worker.policy.racing
        if not policy.enabled or not self._budget.earn(policy):
            return None
        peers = {peer.key: peer for peer in self._decodes()}
        loads = {key: peer.load.num_requests for key, peer in peers.items()}
        if first is None or self._worker.takes_new:
            loads[LOCAL] = self._local.num_requests
        key = hedging.hedge_target(policy, key_of(first), loads)
        if key is None or (key == LOCAL and not self._admits(specs)):
            return None
        self._budget.spend()
        add_event("race", first=name_of(first), rival=key or "here")
        return Hedge((first, peers.get(key)))

    def _admits(self, specs: Sequence[RequestSpec]) -> bool:
        try:
            self._local.admit(specs[:1])
        except RequestError:
            return False
        return True


class HedgedStream(AsyncIterator[Generated]):
    """The tokens of the attempt that makes the first one.  Raises the last one's error."""

    def __init__(
        self,
        worker: WorkerContext,
        hedge: Hedge,
        progress: RequestProgress,
        attempts: Sequence[Stream[Generated]],
    ) -> None:
        self._metrics = worker.metrics
        self._hedge = hedge
        self._progress = progress
        self._merged = Merged(
            [_HedgeAttempt(index, attempt) for index, attempt in enumerate(attempts)]
        )
        self._has_won = False

    async def __anext__(self) -> Generated:
        hedge = self._hedge
        async for index, item in self._merged:
            if self._has_won and index != hedge.ahead:
                continue  # it came while its attempt was being closed
            if isinstance(item, Generated):
                if not self._has_won:
                    self._won(index)
                return item
            if self._has_won:
                raise item
            if hedge.failed:
                hedge.ahead = index
                self._metrics.races.labels("none").inc()
                raise item
            hedge.failed.add(key_of(hedge.entrants[index]))
        raise StopAsyncIteration

    def _won(self, index: int) -> None:
        self._has_won, self._hedge.ahead = True, index
        self._hedge.failed.clear()
        self._merged.end(1 - index)
        self._metrics.races.labels("rival" if index else "first").inc()
        self._metrics.race_wasted_tokens.inc(len(self._progress.spec.prompt))
        add_event("race_won", by="rival" if index else "first")

    async def aclose(self) -> None:
        await self._merged.aclose()


class _HedgeAttempt(AsyncIterator[HedgeItem]):
    """One attempt of a hedge, whose failure is its last item."""

    def __init__(self, index: int, attempt: Stream[Generated]) -> None:
        self._index = index
        self._attempt = attempt
        self._has_failed = False

    async def __anext__(self) -> HedgeItem:
        if self._has_failed:
            raise StopAsyncIteration
        try:
            return self._index, await anext(self._attempt)
        except (PeerError, RequestError) as e:
            self._has_failed = True
            return self._index, e

    async def aclose(self) -> None:
        await self._attempt.aclose()
