"""The choice of a worker for a request whose tokens are not known, in constant time."""

from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Generic, TypeVar

import msgspec

from pdcluster_schema.routing import DecodeScoreSpec, RelayingSpec

_PROMPTS = (b'"messages"', b'"prompt"')

_POINTS = 32
"""Places of each worker on the ring: of 64 workers the largest share is 1.4 times the mean."""


@dataclass(frozen=True, slots=True)
class UpstreamState:
    """key: of pod and engine.  takes: new requests.  num_requests: by its last report."""

    key: str
    pod: str
    address: str
    takes: bool
    num_requests: int
    is_connected: bool = True
    has_drained: bool = False


class Candidate:
    """in_flight: requests of this router there.  elsewhere: its other ones, by its last report,
    which said `reported`.
    """

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.in_flight = 0
        self.elsewhere = 0
        self.reported = 0
        # the chooser's: whether it keeps it, and where
        self.is_member = False
        self.level = 0

    @property
    def num_requests(self) -> int:
        return self.in_flight + self.elsewhere


CandidateT = TypeVar("CandidateT", bound=Candidate)


class Picker(Generic[CandidateT]):
    def __init__(self) -> None:
        self._members: list[CandidateT] = []
        self._levels: list[dict[CandidateT, None]] = [{}]
        self._lowest = 0
        self._total = 0
        self._turn = 0
        self._ring: tuple[list[int], list[CandidateT]] | None = None  # made when it is needed

    @property
    def members(self) -> Sequence[CandidateT]:
        return self._members

    def set(self, members: Sequence[CandidateT]) -> None:
        for member in self._members:
            member.is_member = False
        self._members = sorted(members, key=lambda each: each.pod)
        self._levels, self._lowest, self._total, self._ring = [{}], 0, 0, None
        for member in self._members:
            member.is_member = True
            self._put(member, member.num_requests)
            self._total += member.num_requests

    def follow(
        self, candidates: Mapping[str, CandidateT], found: Mapping[str, UpstreamState]
    ) -> None:
        """Choose among those that take requests now, by their last reports; both by key."""
        takes = {candidates[key]: state.num_requests for key, state in found.items() if state.takes}
        if {*takes} != {*self._members}:
            self.set([*takes])
        for candidate, num_requests in takes.items():
            self.report(candidate, num_requests)

    def begin(self, candidate: CandidateT) -> None:
        candidate.in_flight += 1
        self._move(candidate, 1)

    def end(self, candidate: CandidateT) -> None:
        candidate.in_flight -= 1
        self._move(candidate, -1)

    def report(self, candidate: CandidateT, num_requests: int) -> None:
        candidate.reported = num_requests
        elsewhere = max(0, num_requests - candidate.in_flight)
        change, candidate.elsewhere = elsewhere - candidate.elsewhere, elsewhere
        if change:
            self._move(candidate, change)

    def choose(
        self,
        policy: RelayingSpec,
        score: DecodeScoreSpec,
        affinity: bytes,
        tried: Collection[CandidateT],
    ) -> CandidateT | None:
        """None when each has been tried.  score: bounds what affinity draws to one worker."""
        if affinity and self._members:
            return self._by_affinity(score, affinity, tried)
        if policy.policy == "roundRobin":
            return self._in_turn(tried)
        return self._least(tried)

    def _least(self, tried: Collection[CandidateT]) -> CandidateT | None:
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
        self, score: DecodeScoreSpec, affinity: bytes, tried: Collection[CandidateT]
    ) -> CandidateT | None:
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


def affinity_of(policy: RelayingSpec, score: DecodeScoreSpec, body: bytes) -> bytes:
    """The session of a request, else for `textPrefix` the beginning of its prompt; b"" = neither.

    The prompt is found by its field's name, so a prefix is the same whatever comes before it.

    >>> body = b'{"model": "m", "messages": [{"role": "user", "content": "A long story"}]}'
    >>> affinity_of(RelayingSpec(policy="textPrefix", prefix_bytes=64), DecodeScoreSpec(), body)
    b'"messages": [{"role": "user", "content": "A long story"}]}'
    >>> affinity_of(RelayingSpec(), DecodeScoreSpec(), body)
    b''
    """
    if score.session_affinity and b'"session"' in body and (session := _session(body)):
        return session
    if policy.policy != "textPrefix":
        return b""
    for name in _PROMPTS:
        if (start := body.find(name)) >= 0:
            return body[start : start + policy.prefix_bytes]
    return b""


def _session(body: bytes) -> bytes:
    try:
        return _bodies.decode(body).pdcluster.session.encode()
    except (ValueError, RecursionError):
        return b""


class _Extension(msgspec.Struct):
    session: str


class _PartialBody(msgspec.Struct):
    pdcluster: _Extension


_bodies = msgspec.json.Decoder(_PartialBody)
