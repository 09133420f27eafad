"""A random walk over the credit ledger beside a naive model of it.

Checked after every step: outstanding = unused grants + work in hand, the limit
holds but for a lone request, the line never waits without reason, and the
answers equal the model's: by priority, then to the peer that was served the
fewest tokens since its priority's line was last empty, then by arrival.  At the
end everything finishes and every want that was left has been granted.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdcluster_worker.routing.batching import Grant
from pdcluster_worker.routing.credits import CreditLedger

PEERS = st.sampled_from(["d0", "d1"])  # few names, so that steps meet in one request
REQUEST_IDS = st.sampled_from(["a", "b", "c"])
LIMITS = st.sampled_from([10, 20, 30, 40])
# coarse, so that sums often meet a limit exactly; 45 is over each
TOKENS = st.sampled_from([1, 5, 10, 15, 20, 45])


@dataclass(frozen=True)
class Want:
    """One waiting request of the model; compares in granting order by `order`."""

    grant: Grant
    tokens: int
    order: tuple[int, int]


@dataclass
class Shares:
    """Tokens served to each peer of one priority, since its line was last empty."""

    served: dict[str, int] = field(default_factory=dict)
    level: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """The ledger and, beside it, plain lists and dicts that say the same."""

    @initialize(limit=LIMITS)
    def begin(self, limit: int) -> None:
        self.ledger = CreditLedger(limit)
        self.limit = limit
        self.is_stopped = False
        self.arrivals = 0
        self.waiting: list[Want] = []
        self.unused: dict[Grant, int] = {}
        self.queues: dict[int, Shares] = {}
        self.paid: dict[Grant, Shares] = {}
        self.working: dict[Grant, int] = {}

    @rule(peer=PEERS, request_id=REQUEST_IDS, tokens=TOKENS, priority=st.integers(-1, 1))
    def claim(self, peer: str, request_id: str, tokens: int, priority: int) -> None:
        grant = Grant(peer, request_id)
        known = (
            grant in self.unused
            or grant in self.working
            or any(claim.grant == grant for claim in self.waiting)
        )
        if not known:
            shares = self.queues.setdefault(priority, Shares())
            if not any(
                claim.grant.peer == peer and claim.order[0] == priority for claim in self.waiting
            ):
                shares.served[peer] = max(shares.level, shares.served.get(peer, 0))
            self.waiting.append(Want(grant, tokens, (priority, self.arrivals)))
            self.arrivals += 1
        granted = self.ledger.claim(peer, request_id, tokens, priority)
        expected = self.expected_grants()
        is_granted = grant in self.unused or grant in self.working
        assert granted == ([grant] if known and is_granted else expected)
        assert (grant in granted) == is_granted

    @rule(peer=PEERS, request_id=REQUEST_IDS)
    def release(self, peer: str, request_id: str) -> None:
        grant = Grant(peer, request_id)
        self.waiting = [claim for claim in self.waiting if claim.grant != grant]
        if (tokens := self.unused.pop(grant, None)) is not None:
            self.paid[grant].served[peer] -= tokens
        self.drop_empty_lines()
        granted = self.ledger.release(peer, request_id)
        assert self.expected_grants() == granted

    @rule(peer=PEERS, request_id=REQUEST_IDS)
    def start(self, peer: str, request_id: str) -> None:
        grant = Grant(peer, request_id)
        assert self.ledger.start(peer, request_id) == (grant in self.unused)
        if grant in self.unused:
            self.working[grant] = self.unused.pop(grant)

    @rule(peer=PEERS, request_id=REQUEST_IDS)
    def finish(self, peer: str, request_id: str) -> None:
        self.working.pop(Grant(peer, request_id), None)
        granted = self.ledger.finish(peer, request_id)
        assert self.expected_grants() == granted

    @rule(peer=PEERS)
    def drop_peer(self, peer: str) -> None:
        self.waiting = [claim for claim in self.waiting if claim.grant.peer != peer]
        self.unused = {grant: tokens for grant, tokens in self.unused.items() if grant.peer != peer}
        self.drop_empty_lines()
        for shares in self.queues.values():
            shares.served.pop(peer, None)
        granted = self.ledger.drop_peer(peer)
        assert self.expected_grants() == granted

    @rule(limit=LIMITS)
    def set_limit(self, limit: int) -> None:
        self.limit = limit
        granted = self.ledger.set_limit(limit)
        assert self.expected_grants() == granted

    @rule()
    def stop(self) -> None:
        self.is_stopped = True
        self.ledger.stop()

    @rule()
    def resume(self) -> None:
        self.is_stopped = False
        granted = self.ledger.resume()
        assert self.expected_grants() == granted

    @invariant()
    def tokens_are_conserved(self) -> None:
        assert self.ledger.outstanding_tokens == self.outstanding()
        assert self.ledger.queued_requests == len(self.waiting)
        assert self.ledger.queued_tokens == sum(claim.tokens for claim in self.waiting)

    @invariant()
    def head_waits_only_for_room(self) -> None:
        if self.waiting and not self.is_stopped:
            head = self.head()
            assert self.outstanding() > 0
            assert self.outstanding() + head.tokens > self.limit

    def outstanding(self) -> int:
        return sum(self.unused.values()) + sum(self.working.values())

    def expected_grants(self) -> list[Grant]:
        """Move the model on by the grant rule; each grant keeps the limit or goes alone."""
        granted = []
        while self.waiting and not self.is_stopped:
            head = self.head()
            if (self.unused or self.working) and self.outstanding() + head.tokens > self.limit:
                break
            shares = self.queues[head.order[0]]
            shares.level = shares.served[head.grant.peer]
            shares.served[head.grant.peer] += head.tokens
            self.waiting.remove(head)
            self.unused[head.grant], self.paid[head.grant] = head.tokens, shares
            granted.append(head.grant)
            self.drop_empty_lines()
        return granted

    def head(self) -> Want:
        best = min(claim.order[0] for claim in self.waiting)
        firsts: dict[str, Want] = {}
        for claim in self.waiting:
            if claim.order[0] == best:
                firsts.setdefault(claim.grant.peer, claim)
        return min(
            firsts.values(),
            key=lambda claim: (self.queues[best].served[claim.grant.peer], claim.order),
        )

    def drop_empty_lines(self) -> None:
        """A line that is empty forgets the peers that it served."""
        left = {claim.order[0] for claim in self.waiting}
        self.queues = {
            priority: shares for priority, shares in self.queues.items() if priority in left
        }

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        expected = {claim.grant: claim.order for claim in self.waiting}
        granted = self.ledger.resume()
        for grant in list(self.unused):
            granted += self.ledger.release(grant.peer, grant.request_id)
        for grant in list(self.working):
            granted += self.ledger.finish(grant.peer, grant.request_id)
        for grant in granted:  # grows while it is read: each one that finishes lets others in
            assert self.ledger.start(grant.peer, grant.request_id)
            granted += self.ledger.finish(grant.peer, grant.request_id)
        assert len(granted) == len(expected)
        assert set(granted) == set(expected)
        assert [expected[grant][0] for grant in granted] == sorted(
            order[0] for order in expected.values()
        )
        for peer in ("d0", "d1"):
            orders = [expected[grant] for grant in granted if grant.peer == peer]
            assert orders == sorted(orders)
        assert (
            self.ledger.outstanding_tokens,
            self.ledger.queued_requests,
            self.ledger.queued_tokens,
        ) == (0, 0, 0)


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_credits_random_walk = LedgerMachine.TestCase
