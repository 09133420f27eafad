"""capacityAware and latencyAware: the vectors of [O5] and table 17-3."""

from random import Random

import pytest

from pdcluster_schema.routing import CapacityAwareSpec, LatencyAwareSpec
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize
from pdcluster_worker.routing.decode_score.latency import (
    capacity_aware,
    extended_cost,
    latency_aware,
    simple_cost,
)
from pdcluster_worker.routing.decode_score.policies import select

ASKED = RequestSize(prompt_tokens=160, block_size=16)


@pytest.mark.parametrize(
    ("busy_ratio", "active", "expected"),
    [(0.0, 0, 0.0), (1.0, 0, 70.0), (0.0, 10, 3.0), (0.8, 10, 59.0)],
)
def test_o5_simple_cost_weighs_occupancy_percent_and_active_requests(
    busy_ratio: float, active: int, expected: float
) -> None:
    assert simple_cost(
        CapacityAwareSpec(), DecodeCandidate("a", active, busy_ratio=busy_ratio)
    ) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (DecodeCandidate("a"), 0),
        (DecodeCandidate("a", decode_blocks=1, total_blocks=100), 3),
        (DecodeCandidate("a", num_requests=1), 1),
        (DecodeCandidate("a", matched_blocks=1), -10),
        (DecodeCandidate("a", matched_blocks=99), -10),  # a flag: how much is cached does not count
        (DecodeCandidate("a", memory_bandwidth_ratio=0.01), 0.5),
        (DecodeCandidate("a", is_recent=True), -1),
        (DecodeCandidate("a", 8, False, 3, True, 0, 50, 100, 0.9, 0.6), 150 + 8 - 10 + 30 - 1),
    ],
    ids=["idle", "kv", "active", "match", "long match", "bandwidth", "recent", "all"],
)
def test_o5_extended_cost_has_the_factors_of_table_17_3(
    worker: DecodeCandidate, expected: float
) -> None:
    assert extended_cost(LatencyAwareSpec(), worker) == pytest.approx(expected)


@pytest.mark.parametrize(("kv_percent", "expected"), [(3, "cached"), (4, "idle")])
def test_o5_percent_is_0_to_100_so_that_a_match_wins_over_3_percent_only(
    kv_percent: int, expected: str
) -> None:
    cached = DecodeCandidate("cached", matched_blocks=5, decode_blocks=kv_percent, total_blocks=100)
    idle = DecodeCandidate("idle", total_blocks=100)

    assert select(latency_aware(LatencyAwareSpec(), [cached, idle]), 0, Random(0)) == expected


def test_o5_lowest_simple_cost_wins() -> None:
    busy, crowded = (
        DecodeCandidate("busy", 0, busy_ratio=0.9),
        DecodeCandidate("crowded", 20, busy_ratio=0.2),
    )

    assert (
        select(capacity_aware(CapacityAwareSpec(), ASKED, [busy, crowded]), 0, Random(0))
        == "crowded"
    )


def test_capacity_aware_takes_a_worker_without_room_only_where_none_has_it() -> None:
    full = DecodeCandidate("full", decode_blocks=95, total_blocks=100)
    fuller = DecodeCandidate("fuller", 3, decode_blocks=99, total_blocks=100)
    roomy = DecodeCandidate("roomy", 40, busy_ratio=1.0, decode_blocks=90, total_blocks=100)
    unknown = DecodeCandidate("unknown", 90, busy_ratio=1.0)

    def chosen(*candidates: DecodeCandidate) -> str:
        return select(capacity_aware(CapacityAwareSpec(), ASKED, candidates), 0, Random(0))

    assert chosen(full, roomy) == "roomy"
    assert chosen(full, unknown) == "unknown"
    assert chosen(full, fuller) == "full"


def test_weights_are_the_policys() -> None:
    worker = DecodeCandidate("a", 4, matched_blocks=1, busy_ratio=0.5)

    assert simple_cost(CapacityAwareSpec(occupancy_weight=0.0, active_weight=2.0), worker) == 8.0
    assert (
        extended_cost(LatencyAwareSpec(active_weight=0.0, cache_match_weight=2.0), worker) == -2.0
    )
