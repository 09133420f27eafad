"""Costs of decode workers for `capacityAware` and `latencyAware`; the lowest wins.

The formulas and default weights are those of AI Systems Performance Engineering (O'Reilly),
chapter 17, table 17-3.  Percentages are 0 to 100, flags 0 or 1.
"""

from collections.abc import Sequence

from pdcluster_schema.routing import CapacityAwareSpec, LatencyAwareSpec
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize

_NO_CAPACITY = 1e6  # of a worker without room for the request's KV blocks


def simple_cost(policy: CapacityAwareSpec, candidate: DecodeCandidate) -> float:
    """0.7 * occupancy percent + 0.3 * active requests."""
    return (
        policy.occupancy_weight * 100 * candidate.busy_ratio
        + policy.active_weight * candidate.num_requests
    )


def extended_cost(policy: LatencyAwareSpec, candidate: DecodeCandidate) -> float:
    """3 * KV % + requests - 10 * match + 0.5 * memory bandwidth % - recent prefix."""
    return (
        policy.kv_occupancy_weight * 100 * candidate.kv_occupancy_ratio
        + policy.active_weight * candidate.num_requests
        - policy.cache_match_weight * (candidate.matched_blocks > 0)
        + policy.memory_bandwidth_weight * 100 * candidate.memory_bandwidth_ratio
        - policy.recent_prefix_weight * candidate.is_recent
    )


def capacity_aware(
    policy: CapacityAwareSpec, request: RequestSize, candidates: Sequence[DecodeCandidate]
) -> dict[str, float]:
    return {
        c.key: simple_cost(policy, c) + (0.0 if _fits(request, c) else _NO_CAPACITY)
        for c in candidates
    }


def latency_aware(
    policy: LatencyAwareSpec, candidates: Sequence[DecodeCandidate]
) -> dict[str, float]:
    return {c.key: extended_cost(policy, c) for c in candidates}


def _fits(request: RequestSize, candidate: DecodeCandidate) -> bool:
    free_blocks = candidate.free_blocks
    return free_blocks is None or request.num_blocks <= free_blocks
