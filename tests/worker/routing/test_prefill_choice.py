"""Prefill workers of a decode worker: queue of credits, choice [Y10], and link rates."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.routing.prefill_choice import (
    MAX_PAIRS,
    CreditQueue,
    LinkRates,
    PrefillCandidate,
    choose_prefill,
)

ADD = st.tuples(st.just("add"), st.sampled_from("abcdef"), st.integers(1, 100), st.integers(-1, 1))
DISCARD = st.tuples(st.just("discard"), st.sampled_from("abcdef"), st.just(0), st.just(0))


def test_queue_has_a_line_of_its_own_for_each_worker_that_is_named() -> None:
    queue = CreditQueue()
    for number in range(3):
        queue.add(f"a{number}", tokens=10, priority=0, only="a")
    queue.add("first", tokens=10, priority=0)
    queue.add("b0", tokens=10, priority=-1, only="b")
    queue.add("second", tokens=10, priority=0)

    assert queue.heads(1) == ["b0", "a0", "first"]
    queue.discard("b0")
    queue.discard("a0")
    assert queue.heads(1) == ["a1", "first"]
    assert (queue.num_requests, queue.num_tokens) == (4, 40)


@given(st.lists(ADD | DISCARD, max_size=40))
def test_queue_equals_a_sorted_list(steps: list[tuple[str, str, int, int]]) -> None:
    queue = CreditQueue()
    model: dict[str, tuple[int, int, int]] = {}  # id -> (priority, arrival, tokens)
    for arrival, (verb, request_id, tokens, priority) in enumerate(steps):
        if verb == "add":
            queue.add(request_id, tokens, priority)
            model.setdefault(request_id, (priority, arrival, tokens))
        else:
            queue.discard(request_id)
            model.pop(request_id, None)

        assert queue.heads(100) == sorted(model, key=lambda name: model[name])
        assert queue.num_requests == len(model)
        assert all((name in queue) == (name in model) for name in "abcdef")
        assert all(queue.tokens(name) == tokens for name, (_, _, tokens) in model.items())
        assert queue.num_tokens == sum(tokens for _, _, tokens in model.values())


SIZES = st.integers(0, 3).map(lambda n: 64 * n)
PREFILL = st.lists(
    st.builds(
        PrefillCandidate,
        key=st.text("abcdef", min_size=1, max_size=2),
        matched_tokens=SIZES,
        queued_tokens=SIZES,
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda c: c.key,
)
POLICIES = st.builds(
    PrefillScoreSpec,
    prefix_weight=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    load_weight=st.sampled_from([0.0, 1.0, 1.5]),
)


@pytest.mark.parametrize(
    ("prefix_weight", "load_weight", "expected"),
    [(1.0, 1.0, "idle"), (2.0, 1.0, "cached"), (1.0, 0.0, "cached"), (0.0, 1.0, "idle")],
)
def test_prefill_choice_weighs_prefix_against_load(
    prefix_weight: float, load_weight: float, expected: str
) -> None:
    cached = PrefillCandidate("cached", matched_tokens=512, queued_tokens=600)
    idle = PrefillCandidate("idle", matched_tokens=0, queued_tokens=0)
    policy = PrefillScoreSpec(prefix_weight=prefix_weight, load_weight=load_weight)

    assert expected == choose_prefill(policy, [cached, idle], Random(0))


def test_prefill_choice_spreads_ties_uniformly() -> None:
    prefill = [PrefillCandidate(key, 0, 0) for key in "abcd"]
    tie = Random(7)

    counts = Counter(choose_prefill(PrefillScoreSpec(), prefill, tie) for _ in range(4000))

    # 1000 each expected; 150 is over five standard deviations (27)
    assert all(abs(counts[key] - 1000) < 150 for key in "abcd")


@given(policy=POLICIES, candidates=PREFILL, seed=st.integers(0, 9), data=st.data())
def test_prefill_choice_is_cheapest_and_ignores_order(
    policy: PrefillScoreSpec, candidates: list[PrefillCandidate], seed: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    costs = {
        c.key: policy.load_weight * c.queued_tokens - policy.prefix_weight * c.matched_tokens
        for c in candidates
    }

    chosen = choose_prefill(policy, candidates, Random(seed))

    assert costs[chosen] == min(costs.values())
    assert chosen == choose_prefill(policy, shuffled, Random(seed))


def test_pair_rates_follow_a_link_that_becomes_slow() -> None:
    rates = LinkRates()
    rates.add("p", 1000, 0.001)
    for _ in range(20):
        rates.add("p", 1000, 1.0)

    assert 0.05 < rates.seconds("p", 1000) < 1.0


def test_pair_rates_take_nothing_from_what_is_too_short_to_tell() -> None:
    rates = LinkRates()
    rates.add("p", 1000, 0.0)
    rates.add("p", 0, 1.0)

    assert rates.seconds("p", 10) == 0.0


def test_pair_rates_are_bounded() -> None:
    rates = LinkRates()
    for number in range(MAX_PAIRS + 1):
        rates.add(str(number), 1, 1.0)

    assert [rates.seconds(key, 1) for key in ("0", "1", str(MAX_PAIRS))] == [0.0, 1.0, 1.0]


def test_link_rate_is_a_fading_average() -> None:
    rates = LinkRates()
    rates.add("p", 1000, 1.0)
    rates.add("p", 2000, 1.0)

    assert rates.seconds("p", 2400) == 2.0
    assert rates.seconds("unknown", 2400) == 0.0
