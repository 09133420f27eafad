"""Groups of wants that are granted together: windows, buckets, the fast lane, shares
of the peers.
"""

import pytest

from pdcluster_schema.routing import LatencyClassSpec, PrefillQueueSpec
from pdcluster_worker.routing.batching import FAST_IN_A_ROW, Grant
from pdcluster_worker.routing.credits import CreditLedger
from tests.worker.fake_clock import FakeClock

LATENCY = PrefillQueueSpec(mode="latencyFirst")
THROUGHPUT = PrefillQueueSpec(mode="throughputFirst")


class Queue:
    """A ledger with a clock; wants are named by what comes."""

    def __init__(
        self, policy: PrefillQueueSpec, limit: int = 1000, batch_tokens: int = 500
    ) -> None:
        self.clock = FakeClock()
        self.ledger = CreditLedger(limit, self.clock)
        self.batch_tokens = batch_tokens
        self.groups: list[int] = []
        self.ledger.set_policy(policy, batch_tokens)
        self.ledger.on_group = self.groups.append

    def claim(
        self, *request_ids: str, tokens: int = 10, priority: int = 0, peer: str = "d0"
    ) -> list[str]:
        """Wants granted while these come, all at one moment."""
        return [
            each
            for request_id in request_ids
            for each in ids(self.ledger.claim(peer, request_id, tokens, priority))
        ]

    def after(self, milliseconds: float) -> list[str]:
        """Wants granted because time has passed."""
        self.clock.advance(milliseconds / 1000)
        return ids(self.ledger.grant_due())

    def open_connections(self) -> None:
        """Arrivals so dense that the next prompt expects company; all gone again."""
        for number in range(30):
            self.claim(f"crowd{number}")
            self.clock.advance(0.0005)
        self.clock.advance(0.1)
        self.ledger.grant_due()
        for number in range(30):
            self.ledger.release("d0", f"crowd{number}")
        assert (self.ledger.outstanding_tokens, self.ledger.queued_requests) == (0, 0)
        for number in range(30):
            self.claim(f"again{number}", priority=1000)
            self.ledger.release("d0", f"again{number}")
        self.groups.clear()


def ids(grants: list[Grant]) -> list[str]:
    return [grant.request_id for grant in grants]


def test_ledger_of_a_worker_without_an_engine_takes_any_policy() -> None:
    """A router's, or that of a worker whose engines are all lost: its limit is 0."""
    queue = Queue(LATENCY, limit=0)

    assert queue.ledger.due is None
    assert queue.claim("a", "b") == ["a"]


@pytest.mark.parametrize("policy", [LATENCY, THROUGHPUT], ids=lambda policy: policy.mode)
def test_lone_prompt_at_low_load_does_not_wait(policy: PrefillQueueSpec) -> None:
    queue = Queue(policy)
    assert queue.claim("a") == ["a"]
    queue.ledger.release("d0", "a")
    queue.clock.advance(1)

    assert queue.claim("b") == ["b"]
    assert queue.groups == [1, 1]


@pytest.mark.parametrize(
    ("policy", "window"),
    [
        pytest.param(LATENCY, 2, id="latencyFirst"),
        pytest.param(THROUGHPUT, 10, id="throughputFirst"),
    ],
)
def test_prompts_of_one_window_are_granted_together(
    policy: PrefillQueueSpec, window: float
) -> None:
    """On an idle worker that expects company: the least window, or the greatest."""
    queue = Queue(policy)
    queue.open_connections()
    first = queue.clock()
    assert queue.claim("a") == []
    assert queue.ledger.due == pytest.approx(first + window / 1000)
    assert queue.after(window - 1) == []
    assert queue.claim("b", peer="d1") == []

    assert queue.after(1.001) == ["a", "b"]
    assert queue.groups == [2]
    assert queue.ledger.due is None


@pytest.mark.parametrize(("busy_tokens", "window"), [(250, 4), (500, 6), (999, 10)])
def test_window_grows_with_the_load(busy_tokens: int, window: float) -> None:
    """latencyFirst: from 2 ms on an idle worker to 10 ms where all credit is out."""
    queue = Queue(LATENCY)
    assert queue.claim("busy", tokens=busy_tokens) == ["busy"]
    now = queue.clock()
    queue.claim("a", tokens=1)

    assert queue.ledger.due == pytest.approx(now + window / 1000, abs=2e-5)


def test_throughput_first_grants_eight_at_once() -> None:
    queue = Queue(THROUGHPUT)
    queue.open_connections()
    names = [f"r{number}" for number in range(8)]

    assert queue.claim(*names[:7]) == []
    assert queue.claim(names[7]) == names
    assert queue.groups == [8]


def test_a_group_has_a_full_batch_at_most_to_wait_for() -> None:
    queue = Queue(LATENCY, batch_tokens=100)
    queue.open_connections()

    assert queue.claim("a", tokens=60) == []
    assert queue.claim("b", tokens=40) == ["a", "b"]
    queue.clock.advance(1)
    assert queue.claim("fills a batch by itself", tokens=100) == ["fills a batch by itself"]


def test_a_group_has_no_more_than_the_most_prompts() -> None:
    queue = Queue(
        PrefillQueueSpec(mode="throughputFirst", min_prompts=2, max_prompts=3), limit=1000
    )
    queue.ledger.stop()
    queue.claim(*"abcdefg")
    granted = ids(queue.ledger.resume())

    assert (granted, queue.groups) == ([*"abcdef"], [3, 3])
    assert queue.after(10.001) == ["g"]


def test_a_group_takes_no_more_than_there_is_credit_for() -> None:
    queue = Queue(THROUGHPUT, limit=25)
    queue.open_connections()
    assert queue.claim("a", "b", "c") == []
    assert queue.after(10.001) == ["a", "b"]

    queue.ledger.start("d0", "a")
    # its window has ended: it waits for room alone
    assert ids(queue.ledger.finish("d0", "a")) == ["c"]


def test_prompts_of_one_bucket_are_granted_together() -> None:
    """[O11]: up to 512, from 513 to 1024."""
    queue = Queue(LATENCY, limit=10_000, batch_tokens=5000)
    queue.open_connections()
    queue.claim("short", tokens=512)
    queue.claim("long", tokens=513)
    queue.clock.advance(0.001)
    queue.claim("too", tokens=1)

    assert queue.after(1.5) == ["short", "too", "long"]
    assert queue.groups == [2, 1]


def test_buckets_are_those_of_the_policy() -> None:
    queue = Queue(LATENCY.model_copy(update={"length_buckets": [20]}))
    queue.open_connections()
    queue.claim("short", tokens=20)
    queue.claim("long", tokens=21)
    queue.after(2.5)

    assert queue.groups == [1, 1]


def test_latency_classes_have_a_window_each() -> None:
    classes = [
        LatencyClassSpec(priority=-10, window_milliseconds=0),
        LatencyClassSpec(priority=0, window_milliseconds=50),
    ]
    queue = Queue(LATENCY.model_copy(update={"latency_classes": classes}))
    queue.open_connections()
    now = queue.clock()
    assert queue.claim("urgent", priority=-10) == ["urgent"]
    assert queue.claim("normal", priority=-9) == []
    assert queue.ledger.due == pytest.approx(now + 0.05)
    assert queue.claim("low", priority=1) == []

    # no class: the mode's own window; nothing waits behind one that is not due
    assert queue.after(10.001) == ["low"]
    assert queue.after(40) == ["normal"]


def test_fast_lane_waits_for_nothing_and_goes_first() -> None:
    queue = Queue(THROUGHPUT.model_copy(update={"fast_lane_tokens": 16}), limit=100)
    queue.open_connections()
    assert queue.claim("fast", tokens=16) == ["fast"]
    assert queue.claim("long", tokens=17) == []

    queue.ledger.stop()
    queue.clock.advance(0.02)
    queue.claim("later", tokens=16)
    assert ids(queue.ledger.resume()) == ["later", "long"]


def test_fast_lane_does_not_starve_the_other() -> None:
    queue = Queue(PrefillQueueSpec(fast_lane_tokens=1), limit=1000)
    queue.ledger.stop()
    queue.claim("long", tokens=2)
    queue.claim(*[f"fast{number}" for number in range(20)], tokens=1)
    granted = ids(queue.ledger.resume())

    assert granted.index("long") == FAST_IN_A_ROW


def test_cancelled_want_is_no_part_of_its_group() -> None:
    queue = Queue(THROUGHPUT)
    queue.open_connections()
    queue.claim("a", "b")
    assert queue.ledger.release("d0", "a") == []

    assert queue.after(10.001) == ["b"]
    assert (queue.ledger.queued_requests, queue.ledger.queued_tokens) == (0, 0)


def test_peer_that_goes_takes_its_part_of_a_group_with_it() -> None:
    queue = Queue(THROUGHPUT)
    queue.open_connections()
    queue.claim("a")
    queue.claim("b", peer="d1")
    queue.ledger.drop_peer("d0")

    assert queue.after(10.001) == ["b"]


def test_drain_lets_nothing_become_due() -> None:
    queue = Queue(THROUGHPUT)
    queue.open_connections()
    queue.claim("a")
    queue.ledger.stop()

    assert (queue.ledger.due, queue.after(100)) == (None, [])
    assert ids(queue.ledger.resume()) == ["a"]


def test_another_policy_holds_for_those_that_wait() -> None:
    queue = Queue(THROUGHPUT)
    queue.open_connections()
    queue.claim("a", "b")

    assert ids(queue.ledger.set_policy(PrefillQueueSpec(), 500)) == ["a", "b"]
    assert queue.ledger.set_policy(THROUGHPUT, 500) == []


@pytest.mark.parametrize("tokens", [0, -1])
def test_want_of_no_tokens_raises(tokens: int) -> None:
    ledger = CreditLedger(limit_tokens=100)

    with pytest.raises(ValueError, match="request a of peer d0 wants"):
        ledger.claim("d0", "a", tokens, 0)
    assert ledger.queued_requests == 0


def test_unused_grants_are_those_whose_requests_have_not_arrived() -> None:
    ledger = CreditLedger(limit_tokens=100)
    for request_id in ("used", "kept", "returned"):
        ledger.claim("d", request_id, tokens=10, priority=0)
    assert ledger.unused_grants == 3
    ledger.start("d", "used")
    ledger.release("d", "returned")
    ledger.stop()
    ledger.claim("d", "late", tokens=10, priority=0)

    assert ledger.unused_grants == 1
    ledger.drop_peer("d")
    assert ledger.unused_grants == 0
