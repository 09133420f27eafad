"""Worker that each policy takes, and the rules around all of them: pinned, session, hotspot
prevention [O14].
"""

from collections import Counter
from math import exp
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.faults import validated
from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_worker.routing.decode_choice import (
    DecodeChooser,
    home_of,
    select,
    tainted,
    within_share,
    without_hot_prefix,
)
from pdcluster_worker.routing.decode_costs import DecodeCandidate, RequestSize

ASKED = RequestSize(prompt_tokens=160, block_size=16)
NO_PREVENTION = {"hotspotPrevention": False}
COSTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2),
    st.sampled_from([-1.0, 0.0, 1.0, 5.0]),
    min_size=1,
    max_size=6,
)


def policy(name: str, **others: Any) -> DecodeScoreSpec:
    return validated(DecodeScoreSpec, {"policy": name, **others})


def chosen(policy: DecodeScoreSpec, *candidates: DecodeCandidate, **rules: str) -> str:
    return DecodeChooser(Random(0)).choose(policy, ASKED, candidates, **rules).key


def test_least_request_is_the_default_and_takes_the_fewest_requests() -> None:
    assert DecodeScoreSpec().policy == "leastRequest"
    assert (
        chosen(DecodeScoreSpec(), DecodeCandidate("a", 3, is_self=True), DecodeCandidate("b", 2))
        == "b"
    )


@pytest.mark.parametrize("seed", range(5))
def test_least_request_stays_here_in_a_tie(seed: int) -> None:
    candidates = [DecodeCandidate(key, 2, is_self=key == "m") for key in "amz"]

    assert DecodeChooser(Random(seed)).choose(DecodeScoreSpec(), ASKED, candidates).key == "m"


def test_round_robin_takes_each_worker_in_turn_whatever_its_load_and_order() -> None:
    chooser, in_turn = DecodeChooser(Random(0)), policy("roundRobin")
    workers = [
        DecodeCandidate("c", 9),
        DecodeCandidate("a", matched_blocks=10),
        DecodeCandidate("b"),
    ]
    first = [
        chooser.choose(in_turn, ASKED, workers[n % 3 :] + workers[: n % 3]).key for n in range(4)
    ]
    without_b = [
        chooser.choose(in_turn, ASKED, [w for w in workers if w.key != "b"]).key for _ in range(2)
    ]

    assert first == ["a", "b", "c", "a"]
    assert without_b == ["c", "a"]


def test_round_robin_keeps_its_turn_through_requests_of_other_policies() -> None:
    chooser, workers = DecodeChooser(Random(0)), [DecodeCandidate(key) for key in "abc"]
    chooser.choose(policy("roundRobin"), ASKED, workers)
    chooser.choose(DecodeScoreSpec(), ASKED, [DecodeCandidate("c")])

    assert chooser.choose(policy("roundRobin"), ASKED, workers).key == "b"


def test_prefix_aware_takes_the_longest_match_then_the_fewest_requests() -> None:
    by_prefix = policy("prefixAware", **NO_PREVENTION)
    longest, long = (
        DecodeCandidate("x", 90, matched_blocks=9),
        DecodeCandidate("y", 0, matched_blocks=8),
    )
    none = DecodeCandidate("z")

    assert chosen(by_prefix, longest, long, none) == "x"
    assert chosen(by_prefix, longest, DecodeCandidate("w", 4, matched_blocks=9), none) == "w"
    assert chosen(by_prefix, DecodeCandidate("a", 1), none) == "z"


def test_a_small_match_attracts_only_below_the_least_hit_ratio() -> None:
    """The source document's min_cache_hit_ratio."""
    blocks = ASKED.num_blocks
    small = DecodeCandidate("small", 1, matched_blocks=blocks // 2)
    idle = DecodeCandidate("idle")

    assert chosen(policy("prefixAware", **NO_PREVENTION), small, idle) == "small"
    assert (
        chosen(policy("prefixAware", **NO_PREVENTION, minCacheHitRatio=0.75), small, idle) == "idle"
    )
    large = DecodeCandidate("large", 1, matched_blocks=blocks)
    assert (
        chosen(policy("prefixAware", **NO_PREVENTION, minCacheHitRatio=0.75), large, idle)
        == "large"
    )


@pytest.mark.parametrize("name", ["prefixAware", "kvAware"])
def test_a_system_prompt_that_one_worker_has_seen_does_not_draw_every_prompt_there(
    name: str,
) -> None:
    """A few leading blocks are common to all: by default they count from half of the prompt on."""
    seen = DecodeCandidate("seen", 1, matched_blocks=ASKED.num_blocks // 16 + 1, decode_blocks=1)

    assert chosen(policy(name), seen, DecodeCandidate("idle")) == "idle"


@pytest.mark.parametrize(
    ("name", "cached", "expected"),
    [
        ("kvAware", DecodeCandidate("cached", matched_blocks=10, decode_blocks=5), "cached"),
        ("kvAware", DecodeCandidate("cached", matched_blocks=10, decode_blocks=15), "idle"),
        ("latencyAware", DecodeCandidate("cached", 2, matched_blocks=10), "cached"),
        ("capacityAware", DecodeCandidate("cached", 2, matched_blocks=10), "idle"),
    ],
)
def test_policies_with_weights_are_chosen_by_name(
    name: str, cached: DecodeCandidate, expected: str
) -> None:
    assert chosen(policy(name), cached, DecodeCandidate("idle")) == expected


def test_pinned_worker_short_circuits_policy_and_session() -> None:
    workers = [DecodeCandidate("a", 99), DecodeCandidate("b")]
    decision = DecodeChooser(Random(0)).choose(
        DecodeScoreSpec(), ASKED, workers, pinned="a", session="s"
    )

    assert (decision.key, decision.rule) == ("a", "pinned")


def test_session_goes_to_one_worker_at_every_ingress() -> None:
    workers = [DecodeCandidate(key) for key in "abcd"]
    homes = {f"s{n}": chosen(DecodeScoreSpec(), *workers, session=f"s{n}") for n in range(200)}

    assert all(
        chosen(DecodeScoreSpec(), *reversed(workers), session=session) == home
        for session, home in homes.items()
    )
    assert all(30 <= count <= 70 for count in Counter(homes.values()).values())  # 50 each expected


def test_only_the_sessions_of_a_worker_that_goes_move() -> None:
    homes = {f"s{n}": home_of(f"s{n}", "abcd") for n in range(200)}
    after = {session: home_of(session, "abc") for session in homes}

    assert {session for session in homes if after[session] != homes[session]} == {
        s for s, home in homes.items() if home == "d"
    }


def test_session_is_no_reason_to_take_more_than_a_share() -> None:
    home = home_of("s", "ab")
    other = "b" if home == "a" else "a"
    workers = [DecodeCandidate(home, 9), DecodeCandidate(other, 1)]

    assert chosen(DecodeScoreSpec(), *workers, session="s") == other
    assert chosen(policy("leastRequest", **NO_PREVENTION), *workers, session="s") == home
    assert chosen(policy("leastRequest", sessionAffinity=False), *workers, session="s") == other


@pytest.mark.parametrize("name", ["prefixAware", "kvAware", "latencyAware"])
def test_prefix_that_is_hot_everywhere_attracts_no_more(name: str) -> None:
    have = [
        DecodeCandidate(key, 3, matched_blocks=10, decode_blocks=30, total_blocks=3000)
        for key in "abc"
    ]
    idle = DecodeCandidate("idle", 2, decode_blocks=25, total_blocks=3000)

    assert chosen(policy(name), *have, idle) == "idle"
    assert chosen(policy(name, hotWorkersRatio=1.0), *have, idle) != "idle"
    assert chosen(policy(name, **NO_PREVENTION), *have, idle) != "idle"


def test_hot_prefix_leaves_what_is_cached_beyond_it() -> None:
    candidates = [
        DecodeCandidate(key, matched_blocks=n)
        for key, n in (("a", 8), ("b", 8), ("c", 20), ("d", 3))
    ]

    assert [c.matched_blocks for c in without_hot_prefix(candidates, 0.75)] == [0, 0, 12, 0]
    assert [c.matched_blocks for c in without_hot_prefix(candidates, 1.0)] == [5, 5, 17, 0]


def test_prefix_of_a_lone_worker_is_never_hot() -> None:
    assert without_hot_prefix([DecodeCandidate("a", matched_blocks=8)], 0.1)[0].matched_blocks == 8


@pytest.mark.parametrize("name", ["prefixAware", "kvAware", "latencyAware"])
def test_worker_takes_at_most_its_share_of_a_hot_prefix(name: str) -> None:
    """Every request matches at one worker alone; nothing ends."""
    counts: Counter[str] = Counter(dict.fromkeys("abcd", 0))
    chooser, attracted = DecodeChooser(Random(0)), policy(name)
    for _ in range(40):
        workers = [
            DecodeCandidate(key, n, matched_blocks=10 * (key == "a")) for key, n in counts.items()
        ]
        counts[chooser.choose(attracted, ASKED, workers).key] += 1

    assert counts["a"] == 15  # 1.5 means of 10
    assert all(count >= 5 for count in counts.values())


def test_within_share_is_never_empty() -> None:
    for loads in ([0], [0, 0], [5, 5, 5], [100, 0], [1, 2, 3, 4]):
        assert within_share([DecodeCandidate(str(n), load) for n, load in enumerate(loads)], 1.0)


def test_temperature_draws_others_than_the_lowest() -> None:
    warm, chooser = policy("leastRequest", temperature=1.0), DecodeChooser(Random(0))
    counts = Counter(
        chooser.choose(warm, ASKED, [DecodeCandidate("a"), DecodeCandidate("b", 5)]).key
        for _ in range(1000)
    )

    assert 200 < counts["b"] < 340  # 1 / (1 + e) = 0.27


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
