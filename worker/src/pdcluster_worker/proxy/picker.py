"""The choice of a worker for a request whose tokens are not known: pure, and at the same cost for
four workers as for four hundred.

Candidates lie on levels by their number of requests, so the one with the fewest is found without a
look at all of them; and on a ring of hashes, where text or a session that comes again finds the
worker that it had.  A worker that joins or goes takes only its own part of the ring along.
"""

from bisect import bisect
from collections.abc import Collection, Sequence
from hashlib import blake2b
from math import ceil
from typing import Generic, TypeVar

from pdcluster_worker.config.proxy import RelayingPolicy
from pdcluster_worker.config.routing import DecodeScorePolicy

_POINTS = 32
"""Places of each worker on the ring: with 64 workers the largest share is about 1.4 times the mean,
and the bound of a worker's load cuts it.
"""


class Candidate:
    """A worker.

    pod:       its name.
    in_flight: requests of this router there.
    elsewhere: its other requests, by its last report.
    """

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.in_flight = 0
        self.elsewhere = 0
        # the chooser's: whether it keeps it, and where
        self.is_member = False
        self.level = 0

    @property
    def num_requests(self) -> int:
        """All requests there, as far as is known here."""
        return self.in_flight + self.elsewhere


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Picker(Generic[CandidateT]):
    """One per router."""

    def __init__(self) -> None:
        self._members: list[CandidateT] = []
        self._levels: list[dict[CandidateT, None]] = [{}]
        self._lowest = 0
        self._total = 0
        self._turn = 0
        self._ring: tuple[list[int], list[CandidateT]] | None = None  # made when it is needed

    @property
    def members(self) -> Sequence[CandidateT]:
        """Workers that take requests."""
        return self._members

    def set(self, members: Sequence[CandidateT]) -> None:
        """Take these workers, and no others."""
        for member in self._members:
            member.is_member = False
        self._members = sorted(members, key=lambda each: each.pod)
        self._levels, self._lowest, self._total, self._ring = [{}], 0, 0, None
        for member in self._members:
            member.is_member = True
            self._put(member, member.num_requests)
            self._total += member.num_requests

    def begin(self, candidate: CandidateT) -> None:
        """A request goes there."""
        candidate.in_flight += 1
        self._move(candidate, 1)

    def end(self, candidate: CandidateT) -> None:
        """A request there has ended."""
        candidate.in_flight -= 1
        self._move(candidate, -1)

    def report(self, candidate: CandidateT, num_requests: int) -> None:
        """A worker says how many requests it has, those of this router among them."""
        elsewhere = max(0, num_requests - candidate.in_flight)
        change, candidate.elsewhere = elsewhere - candidate.elsewhere, elsewhere
        if change:
            self._move(candidate, change)

    def choose(
        self,
        policy: RelayingPolicy,
        score: DecodeScorePolicy,
        affinity: bytes,
        tried: Collection[CandidateT],
    ) -> CandidateT | None:
        """The worker for a request; None when each has been tried.

        score:    bounds what affinity draws to one worker.
        affinity: what belongs together; b"" = nothing.
        """
        if affinity and self._members:
            return self._by_affinity(score, affinity, tried)
        if policy.policy == "roundRobin":
            return self._in_turn(tried)
        return self._least(tried)

    def _least(self, tried: Collection[CandidateT]) -> CandidateT | None:
        """The one with the fewest requests; of equals the one that has had them longest."""
        if tried:
            left = (member for member in self._members if member not in tried)
            return min(left, key=lambda member: member.num_requests, default=None)
        if not self._members:
            return None
        while not (level := self._levels[self._lowest]):
            self._lowest += 1
        return next(iter(level))

    def _in_turn(self, tried: Collection[CandidateT]) -> CandidateT | None:
        for _ in self._members:
            self._turn = (self._turn + 1) % len(self._members)
            if (found := self._members[self._turn]) not in tried:
                return found
        return None

    def _by_affinity(
        self, score: DecodeScorePolicy, affinity: bytes, tried: Collection[CandidateT]
    ) -> CandidateT | None:
        """The first on the ring, from the hash on, that has not its share of requests yet."""
        points, owners = self._ring or self._make_ring()
        most = (
            ceil(score.max_share_ratio * (1 + self._total) / len(self._members))
            if score.hotspot_prevention
            else self._total + 1
        )
        first = bisect(points, _hash(affinity))
        for place in range(first, first + len(owners)):
            found = owners[place % len(owners)]
            if found.num_requests < most and found not in tried:
                return found
        return self._least(tried)

    def _make_ring(self) -> tuple[list[int], list[CandidateT]]:
        placed = sorted(
            (_hash(f"{number}:{member.pod}".encode()), index)
            for index, member in enumerate(self._members)
            for number in range(_POINTS)
        )
        self._ring = (
            [point for point, _ in placed],
            [self._members[index] for _, index in placed],
        )
        return self._ring

    def _move(self, candidate: CandidateT, change: int) -> None:
        if candidate.is_member:
            del self._levels[candidate.level][candidate]
            self._put(candidate, candidate.level + change)
            self._total += change

    def _put(self, candidate: CandidateT, level: int) -> None:
        while level >= len(self._levels):
            self._levels.append({})
        self._levels[level][candidate] = None
        candidate.level = level
        if level < self._lowest:
            self._lowest = level


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest())
