"""Ledger of a prefill worker: credits, in tokens, granted to each peer.

A claim becomes an unused grant, then work in hand.  Grants go by priority, then in turns of the
peers (`batching.FairQueue`); with nothing outstanding the next one is granted whatever its size.
"""

from collections.abc import Callable, Iterator
from itertools import count
from math import inf

from pdcluster_schema.routing import PrefillQueueSpec
from pdcluster_worker.routing.batching import (
    FAST,
    FAST_IN_A_ROW,
    Batching,
    CreditRequest,
    FairQueue,
    Grant,
    QueueKey,
)


class CreditLedger:
    """limit_tokens: about a batch.  on_group: called with the number of claims granted together."""

    def __init__(self, limit_tokens: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.on_group: Callable[[int], None] = lambda num_requests: None
        self._limit_tokens = limit_tokens
        self._clock = clock
        self._batching = Batching(PrefillQueueSpec())
        self._is_stopped = False
        self._arrivals = count()
        self._claims: dict[Grant, tuple[QueueKey, CreditRequest]] = {}
        self._queues: dict[QueueKey, FairQueue] = {}
        self._unused: dict[Grant, tuple[FairQueue, CreditRequest]] = {}
        self._in_hand: dict[Grant, int] = {}
        self._num_fast = 0  # grants of the fast lane in a row that overtook another want

    def claim(self, peer: str, request_id: str, tokens: int, priority: int) -> list[Grant]:
        """Return all claims granted now; repeats are harmless.  Raises ValueError: tokens < 1."""
        if tokens < 1:
            raise ValueError(
                f"request {request_id} of peer {peer} wants {tokens} tokens: a want is for at "
                "least 1"
            )
        grant = Grant(peer, request_id)
        if grant in self._unused or grant in self._in_hand:
            return [grant]
        if grant not in self._claims:
            now = self._clock()
            self._batching.arrived(now)
            self._add(CreditRequest(grant, tokens, priority, next(self._arrivals), now))
        return self.grant_due()

    def release(self, peer: str, request_id: str) -> list[Grant]:
        """Give back a claim or an unused grant; returns the claims granted in its place."""
        grant = Grant(peer, request_id)
        self._forget(grant)
        if (unused := self._unused.pop(grant, None)) is not None:
            queue, claim = unused
            queue.refund(claim)
        return self.grant_due()

    def start(self, peer: str, request_id: str) -> bool:
        """Turn a grant into work in hand; False without a grant."""
        grant = Grant(peer, request_id)
        if grant not in self._unused:
            return False
        self._in_hand[grant] = self._unused.pop(grant)[1].tokens
        return True

    def finish(self, peer: str, request_id: str) -> list[Grant]:
        """Return the tokens of computed or failed work; unknown ids are a no-op."""
        self._in_hand.pop(Grant(peer, request_id), None)
        return self.grant_due()

    def drop_peer(self, peer: str) -> list[Grant]:
        """Drop claims and unused grants of a lost peer; work in hand stays until `finish`."""
        for grant in [grant for grant in self._claims if grant.peer == peer]:
            self._forget(grant)
        self._unused = {
            grant: unused for grant, unused in self._unused.items() if grant.peer != peer
        }
        for queue in self._queues.values():
            queue.forget(peer)
        return self.grant_due()

    def set_limit(self, limit_tokens: int) -> list[Grant]:
        """A lower limit revokes no grant: it is reached as work finishes."""
        self._limit_tokens = limit_tokens
        return self.grant_due()

    def set_policy(self, policy: PrefillQueueSpec, batch_tokens: int) -> list[Grant]:
        """batch_tokens: of one step of this worker's engines."""
        if (policy, batch_tokens) != (self._batching.policy, self._batching.batch_tokens):
            waiting = sorted(
                (claim for _, claim in self._claims.values()), key=lambda claim: claim.number
            )
            self._batching.policy, self._batching.batch_tokens = policy, batch_tokens
            self._claims.clear()
            self._queues.clear()
            for claim in waiting:
                self._add(claim)
        return self.grant_due()

    def stop(self) -> None:
        """Grant nothing more (drain); unused grants stay valid."""
        self._is_stopped = True

    def resume(self) -> list[Grant]:
        self._is_stopped = False
        return self.grant_due()

    @property
    def due(self) -> float | None:
        """Time when the next batch window ends; None = no claim waits for one."""
        if self._is_stopped or self._batching.is_immediate:
            return None
        now, busy = self._clock(), self._busy_ratio()
        times = [self._batching.ripe_at(key, queue, busy) for key, queue in self._queues.items()]
        return min((time for time in times if time > now), default=None)

    def grant_due(self) -> list[Grant]:
        granted: list[Grant] = []
        while (queue := self._next_queue()) is not None:
            group = list(self._grant_group(*queue))
            granted += group
            if not group:
                break
            self.on_group(len(group))
        return granted

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of unused grants and of work in hand."""
        return sum(claim.tokens for _, claim in self._unused.values()) + sum(self._in_hand.values())

    def grants_at_once(self, tokens: int) -> bool:
        """Return whether a new claim of so many tokens would be granted without waiting."""
        if self._is_stopped or self._queues or not self._batching.is_immediate:
            return False
        if not self._unused and not self._in_hand:
            return True
        return self.outstanding_tokens + tokens <= self._limit_tokens

    @property
    def unused_grants(self) -> int:
        return len(self._unused)

    @property
    def queued_requests(self) -> int:
        return len(self._claims)

    @property
    def queued_tokens(self) -> int:
        return sum(queue.num_tokens for queue in self._queues.values())

    def _busy_ratio(self) -> float:
        return self.outstanding_tokens / max(1, self._limit_tokens)  # 0 without an engine

    def _add(self, claim: CreditRequest) -> None:
        key = self._batching.key(claim.tokens, claim.priority)
        self._claims[claim.grant] = key, claim
        self._queues.setdefault(key, FairQueue()).add(claim)

    def _forget(self, grant: Grant) -> None:
        if (found := self._claims.pop(grant, None)) is not None:
            key, claim = found
            self._queues[key].discard(claim)
            self._drop_empty(key)

    def _drop_empty(self, key: QueueKey) -> None:
        if not self._queues[key].num_requests:
            del self._queues[key]

    def _next_queue(self) -> tuple[QueueKey, FairQueue] | None:
        if self._is_stopped or not self._queues:
            return None
        busy, now = self._busy_ratio(), 0.0 if self._batching.is_immediate else self._clock()
        due = [
            (key, queue)
            for key, queue in self._queues.items()
            if self._batching.ripe_at(key, queue, busy) <= now
        ]
        return min(due, key=self._order, default=None)

    def _order(self, entry: tuple[QueueKey, FairQueue]) -> tuple[int, bool, int]:
        """Priority; then the fast lane, at most FAST_IN_A_ROW times in a row; then arrival."""
        key, queue = entry
        has_turn = key.lane == FAST and self._num_fast < FAST_IN_A_ROW
        return key.priority, not has_turn, queue.oldest().number

    def _grant_group(self, key: QueueKey, queue: FairQueue) -> Iterator[Grant]:
        most = self._batching.most_prompts or inf
        if key.lane == FAST:
            most = 1  # one by one: the other lane may have its turn after any of them
        num, outstanding = 0, self.outstanding_tokens
        while num < most and queue.num_requests:
            claim = queue.next()
            if outstanding > 0 and outstanding + claim.tokens > self._limit_tokens:
                break
            queue.serve(claim)
            del self._claims[claim.grant]
            self._unused[claim.grant] = queue, claim
            self._num_fast = self._num_fast + 1 if self._overtakes(key) else 0
            outstanding += claim.tokens
            num += 1
            yield claim.grant
        self._drop_empty(key)

    def _overtakes(self, key: QueueKey) -> bool:
        """A fast grant goes before ordinary claims of its priority that may be older."""
        others = (other for other in self._queues if other.priority == key.priority)
        return key.lane == FAST and any(other.lane != FAST for other in others)
