"""The credit ledger, one rule a test; `test_credits_machine` walks all of them at random."""

import pytest

from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.fair_queue import Grant


def test_want_within_limit_is_granted_at_once() -> None:
    ledger = CreditLedger(limit_tokens=100)

    assert ledger.claim("d0", "a", tokens=60, priority=0)
    assert ledger.claim("d0", "b", tokens=40, priority=0)
    assert ledger.outstanding_tokens == 100
    assert (ledger.queued_requests, ledger.queued_tokens) == (0, 0)


def test_want_over_limit_is_queued() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)

    assert not ledger.claim("d0", "b", 41, 0)
    assert (ledger.queued_requests, ledger.queued_tokens) == (1, 41)


def test_want_repeated_answers_present_state() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 100, 0)
    ledger.claim("d0", "b", 50, 0)

    assert ledger.claim("d0", "a", 100, 0)
    assert not ledger.claim("d0", "b", 50, 0)
    assert (ledger.outstanding_tokens, ledger.queued_requests) == (100, 1)


def test_want_for_work_in_hand_is_no_second_want() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)
    ledger.start("d0", "a")

    assert ledger.claim("d0", "a", 60, 0)
    assert (ledger.outstanding_tokens, ledger.queued_requests) == (60, 0)


def test_want_of_same_id_from_another_peer_is_another_want() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)

    assert not ledger.claim("d1", "a", 60, 0)
    assert ledger.finish("d1", "a") == []
    assert ledger.release("d0", "a") == [Grant("d1", "a")]


@pytest.mark.parametrize("tokens", [0, -1])
def test_want_of_no_tokens_raises(tokens: int) -> None:
    ledger = CreditLedger(limit_tokens=100)

    with pytest.raises(ValueError, match="request a of peer d0 wants"):
        ledger.claim("d0", "a", tokens, 0)
    assert ledger.queued_requests == 0


def test_want_larger_than_limit_goes_alone() -> None:
    ledger = CreditLedger(limit_tokens=100)
    assert ledger.claim("d0", "huge", 1000, 0)
    assert not ledger.claim("d0", "next", 1, 0)

    ledger.start("d0", "huge")

    assert ledger.finish("d0", "huge") == [Grant("d0", "next")]


def test_want_never_overtakes_the_head() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)
    ledger.claim("d0", "large", 90, 0)

    assert not ledger.claim("d1", "small", 1, 0)
    assert ledger.release("d0", "a") == [Grant("d0", "large"), Grant("d1", "small")]


def test_want_of_better_priority_goes_first() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)
    ledger.claim("d0", "large", 90, priority=0)

    assert ledger.claim("d1", "urgent", 40, priority=-1)
    assert ledger.queued_requests == 1


def test_release_of_want_lets_the_next_in() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)
    ledger.claim("d0", "large", 90, 0)
    ledger.claim("d0", "small", 40, 0)

    assert ledger.release("d0", "large") == [Grant("d0", "small")]


def test_release_of_unknown_or_working_request_is_no_op() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 60, 0)
    ledger.start("d0", "a")

    assert ledger.release("d0", "a") == []
    assert ledger.release("d0", "never") == []
    assert ledger.outstanding_tokens == 60


def test_start_needs_an_unused_grant() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 100, 0)
    ledger.claim("d0", "b", 100, 0)

    assert ledger.start("d0", "a")
    assert not ledger.start("d0", "a")
    assert not ledger.start("d0", "b")
    assert not ledger.start("d1", "a")


def test_finish_of_request_not_started_is_no_op() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 100, 0)

    assert ledger.finish("d0", "a") == []
    assert ledger.outstanding_tokens == 100


def test_drop_peer_keeps_work_in_hand() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "working", 50, 0)
    ledger.claim("d0", "unused", 50, 0)
    ledger.claim("d0", "queued", 50, 0)
    ledger.claim("d1", "other", 50, 0)
    ledger.start("d0", "working")

    assert ledger.drop_peer("d0") == [Grant("d1", "other")]
    assert (ledger.outstanding_tokens, ledger.queued_requests) == (100, 0)
    assert not ledger.start("d0", "unused")
    assert ledger.finish("d0", "working") == []
    assert ledger.outstanding_tokens == 50


def test_set_limit_raised_grants_and_lowered_takes_nothing_back() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 100, 0)
    ledger.claim("d0", "b", 100, 0)

    assert ledger.set_limit(200) == [Grant("d0", "b")]
    assert ledger.set_limit(50) == []
    assert ledger.outstanding_tokens == 200
    assert not ledger.claim("d0", "c", 1, 0)


def test_stop_queues_wants_until_resume() -> None:
    ledger = CreditLedger(limit_tokens=100)
    ledger.claim("d0", "a", 50, 0)
    ledger.stop()

    assert not ledger.claim("d0", "b", 50, 0)
    assert ledger.start("d0", "a")
    assert ledger.finish("d0", "a") == []
    assert ledger.resume() == [Grant("d0", "b")]


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
