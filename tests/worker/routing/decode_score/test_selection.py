"""From costs to a worker: ties, softmax, independence of order [Y10]."""

from collections import Counter
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.routing.decode_score.policies import select, tainted

COSTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2),
    st.sampled_from([-1.0, 0.0, 1.0, 5.0]),
    min_size=1,
    max_size=6,
)


def test_y10_ties_are_drawn_uniformly() -> None:
    draw = Random(7)
    counts = Counter(
        select({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 2.0}, 0, draw) for _ in range(4000)
    )

    assert set(counts) == set("abcd")
    # 1000 each expected; 150 is over five standard deviations (27)
    assert all(abs(counts[key] - 1000) < 150 for key in "abcd")


@given(costs=COSTS, seed=st.integers(0, 9), temperature=st.sampled_from([0.0, 0.5]), data=st.data())
def test_y10_seeded_choice_does_not_depend_on_the_order_of_candidates(
    costs: dict[str, float], seed: int, temperature: float, data: st.DataObject
) -> None:
    shuffled = dict(data.draw(st.permutations(list(costs.items()))))

    assert select(costs, temperature, Random(seed)) == select(shuffled, temperature, Random(seed))


@given(costs=COSTS, seed=st.integers(0, 9))
def test_y10_temperature_0_takes_the_lowest(costs: dict[str, float], seed: int) -> None:
    assert costs[select(costs, 0, Random(seed))] == min(costs.values())


def test_y10_equal_costs_with_a_temperature_are_uniform() -> None:
    draw = Random(7)
    counts = Counter(select(dict.fromkeys("abcd", 3.0), 0.01, draw) for _ in range(4000))

    assert all(abs(counts[key] - 1000) < 150 for key in "abcd")


def test_y10_softmax_is_over_the_normalised_costs() -> None:
    draw, times = Random(7), 20_000
    counts = Counter(
        select({"low": 10.0, "mid": 15.0, "high": 20.0}, 0.5, draw) for _ in range(times)
    )
    weights = {"low": 1.0, "mid": exp(-1.0), "high": exp(-2.0)}

    for key, weight in weights.items():
        assert counts[key] / times == pytest.approx(weight / sum(weights.values()), abs=0.02)


def test_y10_taint_multiplies_the_cost() -> None:
    costs = {"failed": 6.0, "other": 9.0}

    assert select(tainted(costs, {"failed": 2.0, "other": 1.0}), 0, Random(0)) == "other"
    assert select(tainted(costs, {"failed": 1.0, "other": 1.0}), 0, Random(0)) == "failed"


def test_select_without_candidates_raises() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        select({}, 0, Random(0))
