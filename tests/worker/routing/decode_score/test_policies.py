"""Worker that each policy takes, and the rules around all of them: pinned, session, hotspot
prevention [O14].
"""

from collections import Counter
from random import Random
from typing import Any

import pytest

from pdcluster_schema.faults import validated
from pdcluster_schema.routing import DecodeScoreSpec
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize
from pdcluster_worker.routing.decode_score.hotspot import within_share, without_hot_prefix
from pdcluster_worker.routing.decode_score.policies import DecodeChooser, home_of

ASKED = RequestSize(prompt_tokens=160, block_size=16)
NO_PREVENTION = {"hotspotPrevention": False}


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


def test_least_request_spreads_ties_of_others_uniformly() -> None:
    chooser = DecodeChooser(Random(7))
    candidates = [DecodeCandidate(key) for key in "abcd"]
    counts = Counter(chooser.choose(DecodeScoreSpec(), ASKED, candidates).key for _ in range(4000))

    assert all(abs(counts[key] - 1000) < 150 for key in "abcd")


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
    longest, long, none = (
        DecodeCandidate("x", 90, matched_blocks=9),
        DecodeCandidate("y", 0, matched_blocks=8),
        DecodeCandidate("z"),
    )

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


def test_kv_aware_weighs_the_match_against_load() -> None:
    cached = DecodeCandidate("cached", matched_blocks=10, decode_blocks=5)

    assert chosen(policy("kvAware"), cached, DecodeCandidate("idle")) == "cached"
    assert (
        chosen(
            policy("kvAware"),
            DecodeCandidate("cached", matched_blocks=10, decode_blocks=15),
            DecodeCandidate("idle"),
        )
        == "idle"
    )


def test_latency_and_capacity_aware_are_chosen_by_name() -> None:
    cached, idle = (
        DecodeCandidate("cached", 2, matched_blocks=ASKED.num_blocks),
        DecodeCandidate("idle"),
    )

    assert chosen(policy("latencyAware"), cached, idle) == "cached"
    assert chosen(policy("capacityAware"), cached, idle) == "idle"


def test_pinned_worker_short_circuits_policy_and_session() -> None:
    workers = [DecodeCandidate("a", 99), DecodeCandidate("b")]
    decision = DecodeChooser(Random(0)).choose(
        DecodeScoreSpec(), ASKED, workers, pinned="a", session="s"
    )

    assert (decision.key, decision.rule) == ("a", "pinned")


def test_pinned_worker_that_is_no_candidate_raises() -> None:
    with pytest.raises(ValueError, match="worker gone is no candidate"):
        chosen(DecodeScoreSpec(), DecodeCandidate("a"), pinned="gone")


def test_choice_without_candidates_raises() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        chosen(DecodeScoreSpec())


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


def test_failure_taint_moves_requests_elsewhere() -> None:
    failed, other = DecodeCandidate("failed", 4, taint=2.0), DecodeCandidate("other", 6)

    assert chosen(DecodeScoreSpec(), failed, other) == "other"


def test_temperature_draws_others_than_the_lowest() -> None:
    warm, chooser = policy("leastRequest", temperature=1.0), DecodeChooser(Random(0))
    counts = Counter(
        chooser.choose(warm, ASKED, [DecodeCandidate("a"), DecodeCandidate("b", 5)]).key
        for _ in range(1000)
    )

    assert 200 < counts["b"] < 340  # 1 / (1 + e) = 0.27
