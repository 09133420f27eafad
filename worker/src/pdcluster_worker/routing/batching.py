"""Batch window and fair queue of a prefill worker: a length bucket is granted together."""

from bisect import bisect_left
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pdcluster_schema.routing import PrefillQueueSpec


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of a peer to send one named request."""

    peer: str
    request_id: str


@dataclass(frozen=True, slots=True)
class CreditRequest:
    grant: Grant
    tokens: int
    priority: int
    number: int  # of arrival, unique
    arrived_at: float  # seconds of the ledger's clock


class FairQueue:
    """The next is the oldest request of the peer with the fewest tokens served since the queue was
    empty.  A peer that joins late starts at the current level.
    """

    def __init__(self) -> None:
        self._claims: dict[str, dict[Grant, CreditRequest]] = {}
        self._served: dict[str, int] = {}
        self._level = 0  # tokens of the peer that was served last, before that
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, claim: CreditRequest) -> None:
        peer = claim.grant.peer
        if peer not in self._claims:
            self._claims[peer] = {}
            self._served[peer] = max(self._level, self._served.get(peer, 0))
        self._claims[peer][claim.grant] = claim
        self.num_requests += 1
        self.num_tokens += claim.tokens

    def discard(self, claim: CreditRequest) -> None:
        claims = self._claims[claim.grant.peer]
        del claims[claim.grant]
        if not claims:
            del self._claims[claim.grant.peer]
        self.num_requests -= 1
        self.num_tokens -= claim.tokens

    def serve(self, claim: CreditRequest) -> None:
        peer = claim.grant.peer
        self._level = self._served[peer]
        self._served[peer] += claim.tokens
        self.discard(claim)

    def refund(self, claim: CreditRequest) -> None:
        """Undo `serve` after the peer gave the grant back."""
        self._served[claim.grant.peer] -= claim.tokens

    def forget(self, peer: str) -> None:
        """Drop a peer that is gone and has no requests here."""
        self._served.pop(peer, None)

    def next(self) -> CreditRequest:
        """The queue must not be empty."""
        return min(self._firsts(), key=lambda claim: (self._served[claim.grant.peer], claim.number))

    def oldest(self) -> CreditRequest:
        """The queue must not be empty."""
        return min(self._firsts(), key=lambda claim: claim.number)

    def _firsts(self) -> list[CreditRequest]:
        return [next(iter(claims.values())) for claims in self._claims.values()]


FAST, ORDINARY = 0, 1

FAST_IN_A_ROW = 8  # then the other lane has a turn

_NEWEST_GAP = 0.2  # weight of the newest gap in the mean


class QueueKey(NamedTuple):
    """Requests of one key may be granted together; lower keys go first."""

    priority: int
    lane: int
    bucket: int


class Batching:
    """batch_tokens: of one step of its engines; 0 = unknown."""

    def __init__(self, policy: PrefillQueueSpec) -> None:
        self.policy = policy
        self.batch_tokens = 0
        self._last_arrival = -inf
        self._mean_gap = inf

    @property
    def is_immediate(self) -> bool:
        return self.policy.mode == "immediate"

    @property
    def most_prompts(self) -> int | None:
        """None = no bound."""
        return None if self.is_immediate else self.policy.max_prompts

    def key(self, tokens: int, priority: int) -> QueueKey:
        lane = FAST if tokens <= self.policy.fast_lane_tokens else ORDINARY
        bucket = 0 if self.is_immediate else bisect_left(self.policy.length_buckets, tokens)
        return QueueKey(priority, lane, bucket)

    def arrived(self, now: float) -> None:
        gap = now - self._last_arrival
        if self._mean_gap == inf:
            self._mean_gap = gap  # inf for the first
        else:
            self._mean_gap += _NEWEST_GAP * (gap - self._mean_gap)
        self._last_arrival = now

    def ripe_at(self, key: QueueKey, queue: FairQueue, busy_ratio: float) -> float:
        """Time when a group is granted; -inf = at once.  busy_ratio: outstanding over limit."""
        if self.is_immediate or key.lane == FAST or self._is_full(queue):
            return -inf
        window = self.window(key.priority, busy_ratio)
        is_alone = busy_ratio == 0 and queue.num_requests == 1
        if is_alone and self._mean_gap > window:
            return -inf
        return queue.oldest().arrived_at + window

    def window(self, priority: int, busy_ratio: float) -> float:
        policy = self.policy
        for each in policy.latency_classes:
            if priority <= each.priority:
                return each.window_milliseconds / 1000
        low, high = policy.min_window_milliseconds, policy.max_window_milliseconds
        share = 1.0 if policy.mode == "throughputFirst" else min(1.0, busy_ratio)
        return (low + share * (high - low)) / 1000

    def _is_full(self, queue: FairQueue) -> bool:
        policy = self.policy
        enough = policy.min_prompts if policy.mode == "throughputFirst" else policy.max_prompts
        is_batch = 0 < self.batch_tokens <= queue.num_tokens
        return queue.num_requests >= enough or is_batch
