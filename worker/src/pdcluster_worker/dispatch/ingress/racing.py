"""A race of two legs of one choice: the first token decides, and the other leg is closed.

Guarantees: tokens of one leg alone come out; both have ids of their own, so the loser's blocks go
back and the winner's stay; a leg that fails leaves the race to the other.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.dispatch.decode.decoding import DecodeDispatcher
from pdcluster_worker.dispatch.ingress.choosing import HERE, key_of, name_of
from pdcluster_worker.dispatch.ingress.course import Course
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing import racing
from pdcluster_worker.streams import Merged, Stream

Said = tuple[int, Generated | PeerError | RequestError]


@dataclass(slots=True)
class Race:
    """Two workers, None = this one.

    ahead:  the one whose leg goes on, or ended last.
    failed: keys of those whose legs ended before, while there was no token.
    """

    entrants: tuple[Peer | None, Peer | None]
    ahead: int = 0
    failed: set[str] = field(default_factory=set)

    @property
    def where(self) -> Peer | None:
        """The worker whose leg goes on."""
        return self.entrants[self.ahead]


class Racing:
    """Choose the requests that race; one per ingress.  decodes: peers that take new work."""

    def __init__(
        self, worker: Worker, here: DecodeDispatcher, decodes: Callable[[], list[Peer]]
    ) -> None:
        self._worker = worker
        self._here = here
        self._decodes = decodes
        self._budget = racing.RaceBudget()

    def race(self, specs: Sequence[RequestSpec], first: Peer | None) -> Race | None:
        """The race of the first choice of a prompt that was given to `first`; None = it runs there
        alone.
        """
        policy = self._worker.policy.racing
        if not policy.enabled or not self._budget.earn(policy):
            return None
        peers = {peer.key: peer for peer in self._decodes()}
        loads = {key: peer.load.num_requests for key, peer in peers.items()}
        if first is None or self._worker.takes_new:
            loads[HERE] = self._here.num_requests
        key = racing.rival(policy, key_of(first), loads)
        if key is None or (key == HERE and not self._admits(specs)):
            return None
        self._budget.spend()
        note("race", first=name_of(first), rival=key or "here")
        return Race((first, peers.get(key)))

    def _admits(self, specs: Sequence[RequestSpec]) -> bool:
        try:
            self._here.admit(specs[:1])
        except RequestError:
            return False
        return True


class Raced(AsyncIterator[Generated]):
    """The tokens of the leg that makes the first one; both run from now on.

    Raises what the last leg raised when none does.
    """

    def __init__(
        self, worker: Worker, race: Race, course: Course, legs: Sequence[Stream[Generated]]
    ) -> None:
        self._metrics = worker.metrics
        self._race = race
        self._course = course
        self._merged = Merged([_Entrant(index, leg) for index, leg in enumerate(legs)])
        self._has_won = False

    async def __anext__(self) -> Generated:
        race = self._race
        async for index, said in self._merged:
            if self._has_won and index != race.ahead:
                continue  # it came while its leg was being closed
            if isinstance(said, Generated):
                if not self._has_won:
                    self._won(index)
                return said
            if self._has_won:
                raise said
            if race.failed:
                race.ahead = index
                self._metrics.races.labels("none").inc()
                raise said
            race.failed.add(key_of(race.entrants[index]))
        raise StopAsyncIteration

    def _won(self, index: int) -> None:
        self._has_won, self._race.ahead = True, index
        self._race.failed.clear()
        self._merged.end(1 - index)
        self._metrics.races.labels("rival" if index else "first").inc()
        self._metrics.race_wasted_tokens.inc(len(self._course.spec.prompt))
        note("race_won", by="rival" if index else "first")

    async def aclose(self) -> None:
        """Close both legs."""
        await self._merged.aclose()


class _Entrant(AsyncIterator[Said]):
    """One leg of a race, whose failure is its last item."""

    def __init__(self, index: int, leg: Stream[Generated]) -> None:
        self._index = index
        self._leg = leg
        self._has_failed = False

    async def __anext__(self) -> Said:
        if self._has_failed:
            raise StopAsyncIteration
        try:
            return self._index, await anext(self._leg)
        except (PeerError, RequestError) as e:
            self._has_failed = True
            return self._index, e

    async def aclose(self) -> None:
        """Close the leg."""
        await self._leg.aclose()
