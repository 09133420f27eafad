"""A race of two legs of one choice: the first token decides, and the other leg is closed.

Guarantees: tokens of one leg alone come out; both have ids of their own, so the loser's blocks go
back and the winner's stay; a leg that fails leaves the race to the other.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pdcluster_worker.dispatch.decode.decoding import DecodeDispatcher
from pdcluster_worker.dispatch.ingress.choosing import HERE, key_of, name_of
from pdcluster_worker.dispatch.ingress.course import Course, Stream
from pdcluster_worker.dispatch.worker import Worker
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.journeys.journey import note
from pdcluster_worker.merging import Merged
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing import racing

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

    def __init__(self, worker: Worker, here: DecodeDispatcher, decodes: Callable[[], list[Peer]]) -> None:
        self._worker = worker
        self._here = here
        self._decodes = decodes
        self._budget = racing.RaceBudget()

    def race(self, specs: Sequence[RequestSpec], first: Peer | None) -> Race | None:
        """The race of the first choice of a prompt that was given to `first`; None = it runs there alone."""
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

    async def run(self, race: Race, course: Course, legs: tuple[Stream, Stream]) -> Stream:
        """The tokens of the leg that made the first one.  Raises what the last leg raised when none did."""
        metrics = self._worker.metrics
        merged = Merged([_entrant(index, leg) for index, leg in enumerate(legs)])
        has_won = False
        async with aclosing(merged.items()) as items:
            async for index, said in items:
                if has_won and index != race.ahead:
                    continue  # it came while its leg was being closed
                if isinstance(said, Generated):
                    if not has_won:
                        has_won, race.ahead = True, index
                        race.failed.clear()
                        merged.end(1 - index)
                        metrics.races.labels("rival" if index else "first").inc()
                        metrics.race_wasted_tokens.inc(len(course.spec.prompt))
                        note("race_won", by="rival" if index else "first")
                    yield said
                    continue
                if has_won:
                    raise said
                if race.failed:
                    race.ahead = index
                    metrics.races.labels("none").inc()
                    raise said
                race.failed.add(key_of(race.entrants[index]))


async def _entrant(index: int, leg: Stream) -> AsyncGenerator[Said, None]:
    try:
        async with aclosing(leg) as tokens:
            async for generated in tokens:
                yield index, generated
    except (PeerError, RequestError) as e:
        yield index, e
