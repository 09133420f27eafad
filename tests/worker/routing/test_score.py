"""Choice of prefill workers: lowest cost, seeded ties, independence of the
candidates' order [Y10].
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.routing.score import PrefillCandidate, choose_prefill

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


def test_prefill_choice_without_candidates_raises() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        choose_prefill(PrefillScoreSpec(), [], Random(0))


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
