"""Costs of decode workers for `capacityAware` and `latencyAware`: the lowest one runs the request.

The simple cost and the extended one are those of AI Systems Performance Engineering (O'Reilly),
chapter 17; the weights are the policy's, by default the factors of the book's table 17-3.

Percentages are 0 to 100 and flags 0 or 1, so that a cached prefix weighs as
much as three and a third percent of KV occupancy, not more than all of it.
"""

from collections.abc import Sequence

from pdcluster_worker.config.routing import CapacityAwarePolicy, LatencyAwarePolicy
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize

_NO_CAPACITY = 1e6
"""Added where the request's blocks do not fit beside those in use: such a worker comes after every
other one.
"""


def simple_cost(policy: CapacityAwarePolicy, candidate: DecodeCandidate) -> float:
    """0.7 * occupancy percent + 0.3 * active requests, in the policy's weights.

    >>> simple_cost(CapacityAwarePolicy(), DecodeCandidate("a", 10, busy_ratio=0.5))
    38.0
    """
    return (
        policy.occupancy_weight * 100 * candidate.busy_ratio
        + policy.active_weight * candidate.num_requests
    )


def extended_cost(policy: LatencyAwarePolicy, candidate: DecodeCandidate) -> float:
    """3 * KV % + requests - 10 * match + 0.5 * memory bandwidth % - recent prefix, in the policy's
    weights, table 17-3.

    >>> worker = DecodeCandidate("a", 4, decode_blocks=20, total_blocks=100,
    ...     memory_bandwidth_ratio=0.4)
    >>> extended_cost(LatencyAwarePolicy(), worker)
    84.0
    """
    return (
        policy.kv_occupancy_weight * 100 * candidate.kv_occupancy_ratio
        + policy.active_weight * candidate.num_requests
        - policy.cache_match_weight * (candidate.matched_blocks > 0)
        + policy.memory_bandwidth_weight * 100 * candidate.memory_bandwidth_ratio
        - policy.recent_prefix_weight * candidate.is_recent
    )


def capacity_aware(
    policy: CapacityAwarePolicy, request: RequestSize, candidates: Sequence[DecodeCandidate]
) -> dict[str, float]:
    """The simple cost; a worker without room for the request's KV blocks only where none has it."""
    return {
        c.key: simple_cost(policy, c) + (0.0 if _fits(request, c) else _NO_CAPACITY)
        for c in candidates
    }


def latency_aware(
    policy: LatencyAwarePolicy, candidates: Sequence[DecodeCandidate]
) -> dict[str, float]:
    """The extended cost."""
    return {c.key: extended_cost(policy, c) for c in candidates}


def _fits(request: RequestSize, candidate: DecodeCandidate) -> bool:
    free_blocks = candidate.free_blocks
    return free_blocks is None or request.num_blocks <= free_blocks
