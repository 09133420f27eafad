"""Costs of kvAware, capacityAware and latencyAware: the vectors of [Y8], [Y9], [Y12], [Y14] and
[O5] with table 17-3.
"""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pdcluster_schema.routing import CapacityAwareSpec, KvAwareSpec, LatencyAwareSpec
from pdcluster_worker.routing.decode_choice import select
from pdcluster_worker.routing.decode_costs import (
    DecodeCandidate,
    RequestSize,
    capacity_aware,
    cost,
    decay,
    kv_aware,
    latency_aware,
)

TEN_BLOCKS = RequestSize(prompt_tokens=160, block_size=16)


def lowest(costs: dict[str, float]) -> str:
    return select(costs, 0, Random(0))


def test_y8_old_cost_is_overlap_weight_times_prefill_blocks_plus_active_blocks() -> None:
    """The document's example costs 18, 10 and 11: 8 + 10, 5 + 5, 2 + 9 blocks; the second worker
    takes it.
    """
    # blocks matched; blocks that decode, this request's among them
    found = {"w1": (2, 10), "w2": (5, 5), "w3": (8, 9)}
    costs = kv_aware(
        KvAwareSpec(),
        TEN_BLOCKS,
        [
            DecodeCandidate(key, matched_blocks=m, decode_blocks=d - 10)
            for key, (m, d) in found.items()
        ],
    )

    assert costs == {"w1": 18.0, "w2": 10.0, "w3": 11.0}
    assert lowest(costs) == "w2"


@pytest.mark.parametrize(
    ("weights", "worker", "expected"),
    [
        pytest.param(
            {"prefill_load_scale": 2.5},
            DecodeCandidate("w", matched_blocks=2, decode_blocks=3),
            2.5 * 8 + 13,
            id="[Y8] the overlap weight scales the prefill part",
        ),
        pytest.param(
            {"overlap_credit": 0.5},
            DecodeCandidate("w", matched_blocks=8),
            6 + 10,
            id="[Y9] credit is a share of the cached blocks",
        ),
        pytest.param(
            {"overlap_credit": 0.0}, DecodeCandidate("w", matched_blocks=8), 20, id="[Y9] or none"
        ),
        pytest.param(
            {}, DecodeCandidate("w", prefill_tokens=160), 30, id="[Y12] queued prompts count"
        ),
    ],
)
def test_kv_aware_cost_of_one_worker(
    weights: dict[str, float], worker: DecodeCandidate, expected: float
) -> None:
    assert kv_aware(KvAwareSpec(**weights), TEN_BLOCKS, [worker]) == {"w": expected}


@pytest.mark.parametrize(
    ("k", "ahead_tokens", "expected"),
    [(0.0, 1600, 1.0), (1.0, 0, 1.0), (1.0, 160, 0.5), (1.0, 480, 0.25), (2.0, 160, 1 / 3)],
)
def test_y9_decay_is_by_blocks_ahead_over_blocks_of_the_request(
    k: float, ahead_tokens: int, expected: float
) -> None:
    found = decay(KvAwareSpec(prefill_decay=k), TEN_BLOCKS, 64 + ahead_tokens, 64)

    assert found == pytest.approx(expected)


def test_y9_decay_is_relative_to_the_shortest_queue() -> None:
    near = DecodeCandidate("near", matched_blocks=10, prefill_tokens=320)
    far = replace(near, key="far", prefill_tokens=160)
    costs = kv_aware(KvAwareSpec(prefill_decay=1.0), TEN_BLOCKS, [near, far])

    assert costs == {"near": (30 - 10 * 0.5) + 10, "far": (20 - 10) + 10}


@pytest.mark.parametrize(
    ("weights", "worker", "credit_blocks", "expected"),
    [
        pytest.param(
            {"prefill_load_scale": 2.0, "active_request_weight": 0.5},
            DecodeCandidate("w", num_requests=3, prefill_tokens=32, decode_blocks=7),
            4.0,
            2.0 * (12 - 4) + 17 + 1.5,
            id="prefill, decode and active parts",
        ),
        pytest.param({}, DecodeCandidate("w"), 99.0, 10.0, id="credit beyond the prefill blocks"),
        *(
            pytest.param(
                {"track_prefill": False, "active_request_weight": 1.0},
                DecodeCandidate("w", num_requests=3, prefill_tokens=1600, decode_blocks=7),
                credit_blocks,
                expected,
                id=f"untracked, credit {credit_blocks}",
            )
            # without credit as any other, less what is queued
            for credit_blocks, expected in ((4.0, 13 + 3), (40.0, 3), (0.0, 10 + 17 + 3))
        ),
    ],
)
def test_y9_cost_with_a_credit(
    weights: dict[str, Any], worker: DecodeCandidate, credit_blocks: float, expected: float
) -> None:
    assert cost(KvAwareSpec(**weights), TEN_BLOCKS, worker, credit_blocks) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (KvAwareSpec(overlap_credit=0.0), "idle"),
        (KvAwareSpec(overlap_credit=1e6, prefill_load_scale=1e6), "cached"),
    ],
)
def test_y14_weight_0_balances_load_and_a_huge_one_sticks_to_the_cache(
    policy: KvAwareSpec, expected: str
) -> None:
    cached = DecodeCandidate("cached", num_requests=50, matched_blocks=10, decode_blocks=500)

    assert lowest(kv_aware(policy, TEN_BLOCKS, [cached, DecodeCandidate("idle")])) == expected


@pytest.mark.parametrize(
    ("busy_ratio", "active", "expected"),
    [(0.0, 0, 0.0), (1.0, 0, 70.0), (0.0, 10, 3.0), (0.8, 10, 59.0)],
)
def test_o5_simple_cost_weighs_occupancy_percent_and_active_requests(
    busy_ratio: float, active: int, expected: float
) -> None:
    worker = DecodeCandidate("a", active, busy_ratio=busy_ratio)

    assert capacity_aware(CapacityAwareSpec(), TEN_BLOCKS, [worker]) == {
        "a": pytest.approx(expected)
    }


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
    assert latency_aware(LatencyAwareSpec(), [worker]) == {"a": pytest.approx(expected)}


@pytest.mark.parametrize(("kv_percent", "expected"), [(3, "cached"), (4, "idle")])
def test_o5_percent_is_0_to_100_so_that_a_match_wins_over_3_percent_only(
    kv_percent: int, expected: str
) -> None:
    cached = DecodeCandidate("cached", matched_blocks=5, decode_blocks=kv_percent, total_blocks=100)
    idle = DecodeCandidate("idle", total_blocks=100)

    assert lowest(latency_aware(LatencyAwareSpec(), [cached, idle])) == expected


def test_capacity_aware_takes_a_worker_without_room_only_where_none_has_it() -> None:
    full = DecodeCandidate("full", decode_blocks=95, total_blocks=100)
    fuller = DecodeCandidate("fuller", 3, decode_blocks=99, total_blocks=100)
    roomy = DecodeCandidate("roomy", 40, busy_ratio=1.0, decode_blocks=90, total_blocks=100)
    unknown = DecodeCandidate("unknown", 90, busy_ratio=1.0)

    def chosen(*candidates: DecodeCandidate) -> str:
        return lowest(capacity_aware(CapacityAwareSpec(), TEN_BLOCKS, candidates))

    assert chosen(full, roomy) == "roomy"
    assert chosen(full, unknown) == "unknown"
    assert chosen(full, fuller) == "full"


def test_weights_are_the_policys() -> None:
    worker = DecodeCandidate("a", 4, matched_blocks=1, busy_ratio=0.5)
    capacity = CapacityAwareSpec(occupancy_weight=0.0, active_weight=2.0)
    latency = LatencyAwareSpec(active_weight=0.0, cache_match_weight=2.0)

    assert capacity_aware(capacity, TEN_BLOCKS, [worker]) == {"a": 8.0}
    assert latency_aware(latency, [worker]) == {"a": -2.0}
