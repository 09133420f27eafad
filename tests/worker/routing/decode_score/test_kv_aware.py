"""kvAware: the vectors of [Y8], [Y9] and [Y14]."""

from random import Random

import pytest
from msgspec.structs import replace

from pdcluster_schema.faults import validated
from pdcluster_schema.routing import KvAwareSpec
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize
from pdcluster_worker.routing.decode_score.kv_aware import cost, decay, kv_aware
from pdcluster_worker.routing.decode_score.policies import select

TEN_BLOCKS = RequestSize(prompt_tokens=160, block_size=16)


def test_y8_old_cost_is_overlap_weight_times_prefill_blocks_plus_active_blocks() -> None:
    """The document's example costs 18, 10 and 11: 8 + 10, 5 + 5, 2 + 9 blocks; the second worker
    takes it.
    """
    # blocks matched; blocks that decode, this request's among them
    found = {"w1": (2, 10), "w2": (5, 5), "w3": (8, 9)}
    candidates = [
        DecodeCandidate(key, matched_blocks=m, decode_blocks=d - 10)
        for key, (m, d) in found.items()
    ]

    assert kv_aware(KvAwareSpec(), TEN_BLOCKS, candidates) == {"w1": 18.0, "w2": 10.0, "w3": 11.0}
    assert select(kv_aware(KvAwareSpec(), TEN_BLOCKS, candidates), 0, Random(0)) == "w2"


def test_y8_overlap_weight_scales_the_prefill_part() -> None:
    worker = DecodeCandidate("w", matched_blocks=2, decode_blocks=3)

    assert kv_aware(KvAwareSpec(prefill_load_scale=2.5), TEN_BLOCKS, [worker]) == {
        "w": 2.5 * 8 + 13
    }


def test_y9_credit_is_a_share_of_the_cached_blocks() -> None:
    worker = DecodeCandidate("w", matched_blocks=8)

    assert kv_aware(KvAwareSpec(overlap_credit=0.5), TEN_BLOCKS, [worker]) == {"w": 6 + 10}
    assert kv_aware(KvAwareSpec(overlap_credit=0.0), TEN_BLOCKS, [worker]) == {"w": 10 + 10}


@pytest.mark.parametrize(
    ("k", "ahead_tokens", "expected"),
    [(0.0, 1600, 1.0), (1.0, 0, 1.0), (1.0, 160, 0.5), (1.0, 480, 0.25), (2.0, 160, 1 / 3)],
)
def test_y9_decay_is_by_blocks_ahead_over_blocks_of_the_request(
    k: float, ahead_tokens: int, expected: float
) -> None:
    assert decay(KvAwareSpec(prefill_decay=k), TEN_BLOCKS, 64 + ahead_tokens, 64) == pytest.approx(
        expected
    )


def test_y9_decay_is_relative_to_the_shortest_queue() -> None:
    near = DecodeCandidate("near", matched_blocks=10, prefill_tokens=320)
    far = replace(near, key="far", prefill_tokens=160)
    costs = kv_aware(KvAwareSpec(prefill_decay=1.0), TEN_BLOCKS, [near, far])

    assert costs == {"near": (30 - 10 * 0.5) + 10, "far": (20 - 10) + 10}


def test_y9_cost_has_prefill_decode_and_active_parts() -> None:
    worker = DecodeCandidate("w", num_requests=3, prefill_tokens=32, decode_blocks=7)
    policy = KvAwareSpec(prefill_load_scale=2.0, active_request_weight=0.5)

    assert cost(policy, TEN_BLOCKS, worker, credit_blocks=4.0) == 2.0 * (12 - 4) + 17 + 1.5


def test_y9_credit_beyond_the_prefill_blocks_is_no_gain() -> None:
    assert cost(KvAwareSpec(), TEN_BLOCKS, DecodeCandidate("w"), credit_blocks=99.0) == 10.0


def test_y9_without_prefill_tracking_credit_lessens_what_decodes() -> None:
    worker = DecodeCandidate("w", num_requests=3, prefill_tokens=1600, decode_blocks=7)
    policy = KvAwareSpec(track_prefill=False, active_request_weight=1.0)

    assert cost(policy, TEN_BLOCKS, worker, credit_blocks=4.0) == (17 - 4) + 3
    assert cost(policy, TEN_BLOCKS, worker, credit_blocks=40.0) == 3
    # no credit: as any other, less what is queued
    assert cost(policy, TEN_BLOCKS, worker, credit_blocks=0.0) == 10 + 17 + 3


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({"overlapCredit": 0.0}, "idle"), ({"overlapCredit": 1e6, "prefillLoadScale": 1e6}, "cached")],
)
def test_y14_weight_0_balances_load_and_a_huge_one_sticks_to_the_cache(
    weights: dict[str, float], expected: str
) -> None:
    policy = validated(KvAwareSpec, weights)
    cached = DecodeCandidate("cached", num_requests=50, matched_blocks=10, decode_blocks=500)
    idle = DecodeCandidate("idle")

    assert select(kv_aware(policy, TEN_BLOCKS, [cached, idle]), 0, Random(0)) == expected


def test_y12_queued_prefill_tokens_count_against_a_worker() -> None:
    busy, idle = DecodeCandidate("busy", prefill_tokens=160), DecodeCandidate("idle")

    assert kv_aware(KvAwareSpec(), TEN_BLOCKS, [busy, idle]) == {"busy": 30.0, "idle": 20.0}
