"""Costs of decode workers by each policy; the lowest wins.

Those of `capacityAware` and `latencyAware`, and their weights, are of AI Systems Performance
Engineering (O'Reilly), chapter 17, table 17-3.  Percentages are 0 to 100, flags 0 or 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdcluster_schema.routing import CapacityAwareSpec, KvAwareSpec, LatencyAwareSpec

_HOP = 0.5  # cost of a hop to another worker, in requests: breaks ties only

_NO_CAPACITY = 1e6  # of a worker without room for the request's KV blocks


@dataclass(frozen=True, slots=True)
class RequestSize:
    """prompt_tokens: all that need KV before the first new token."""

    prompt_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return max(1, -(-self.prompt_tokens // self.block_size))


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """Counts as last reported, plus what was sent since (`active_load`).

    A struct, because each request makes one of every worker.
    """

    key: str
    num_requests: int = 0
    is_self: bool = False
    matched_blocks: int = 0  # leading blocks of the prompt in the worker's prefix cache
    is_recent: bool = False  # the first block of the prompt was sent there recently
    prefill_tokens: int = 0  # prompt tokens queued there
    decode_blocks: int = 0
    total_blocks: int = 0  # 0 = unknown
    busy_ratio: float = 0.0  # share of time in which its GPU or engine computes
    memory_bandwidth_ratio: float = 0.0
    taint: float = 1.0  # factor of its cost, above 1 after a failure


Costs = dict[str, float]


def least_request(candidates: Sequence[DecodeCandidate]) -> Costs:
    """Requests on the worker; this worker wins ties, which saves a hop.

    >>> least_request([DecodeCandidate("a", 2), DecodeCandidate("b", 2, is_self=True)])
    {'a': 2.5, 'b': 2.0}
    """
    return {c.key: c.num_requests + (0.0 if c.is_self else _HOP) for c in candidates}


def round_robin(candidates: Sequence[DecodeCandidate], last: str) -> Costs:
    """Position after `last` in the order of keys; `last` may be gone.

    >>> abc = [DecodeCandidate(key) for key in "cab"]
    >>> round_robin(abc, last=""), round_robin(abc, last="b")
    ({'a': 0.0, 'b': 1.0, 'c': 2.0}, {'c': 0.0, 'a': 1.0, 'b': 2.0})
    """
    in_turn = sorted((c.key for c in candidates), key=lambda key: (key <= last, key))
    return {key: float(place) for place, key in enumerate(in_turn)}


def prefix_aware(candidates: Sequence[DecodeCandidate]) -> Costs:
    """Minus the blocks matched; ties go to the fewest requests, then to this worker.

    >>> candidates = [DecodeCandidate("a"), DecodeCandidate("b", num_requests=9, matched_blocks=3)]
    >>> min(costs := prefix_aware(candidates), key=costs.__getitem__)
    'b'
    """
    loads = least_request(candidates)
    least_block = 1.0 + max(loads.values())  # no load outweighs a block
    return {c.key: loads[c.key] / least_block - c.matched_blocks for c in candidates}


def kv_aware(
    policy: KvAwareSpec, request: RequestSize, candidates: Sequence[DecodeCandidate]
) -> Costs:
    """Blocks to prefill, queued ones included, plus blocks held, less credit for cached blocks."""
    least = min(c.prefill_tokens for c in candidates)
    costs = {}
    for c in candidates:
        credit = 0.0
        if c.matched_blocks:
            lessened = decay(policy, request, c.prefill_tokens, least)
            credit = policy.overlap_credit * lessened * c.matched_blocks
        costs[c.key] = cost(policy, request, c, credit)
    return costs


def decay(
    policy: KvAwareSpec, request: RequestSize, prefill_tokens: int, least_prefill_tokens: int
) -> float:
    """Factor of the credit for cached blocks: 1 at the worker with the shortest prefill queue.

    >>> decay(KvAwareSpec(prefill_decay=1.0), RequestSize(160, 16), prefill_tokens=320,
    ...     least_prefill_tokens=160)
    0.5
    """
    blocks_ahead = (prefill_tokens - least_prefill_tokens) / request.block_size
    return 1.0 / (1.0 + policy.prefill_decay * blocks_ahead / request.num_blocks)


def cost(
    policy: KvAwareSpec, request: RequestSize, candidate: DecodeCandidate, credit_blocks: float
) -> float:
    """In blocks.  For decode workers that compute no prompts the credit lessens the decode term."""
    active = policy.active_request_weight * candidate.num_requests
    decode_blocks = candidate.decode_blocks + request.num_blocks
    if credit_blocks > 0 and not policy.track_prefill:
        return max(0.0, decode_blocks - credit_blocks) + active
    queued_tokens = candidate.prefill_tokens if policy.track_prefill else 0
    prefill_blocks = (queued_tokens + request.prompt_tokens) / request.block_size
    prefill = policy.prefill_load_scale * max(0.0, prefill_blocks - credit_blocks)
    return prefill + decode_blocks + active


def capacity_aware(
    policy: CapacityAwareSpec, request: RequestSize, candidates: Sequence[DecodeCandidate]
) -> Costs:
    """0.7 * busy percent + 0.3 * active requests."""
    return {
        c.key: policy.occupancy_weight * 100 * c.busy_ratio
        + policy.active_weight * c.num_requests
        + (0.0 if _fits(request, c) else _NO_CAPACITY)
        for c in candidates
    }


def _fits(request: RequestSize, candidate: DecodeCandidate) -> bool:
    free_blocks = max(0, candidate.total_blocks - candidate.decode_blocks)
    return not candidate.total_blocks or request.num_blocks <= free_blocks


def latency_aware(policy: LatencyAwareSpec, candidates: Sequence[DecodeCandidate]) -> Costs:
    """3 * KV % + requests - 10 * match + 0.5 * memory bandwidth % - recent prefix."""
    return {
        c.key: policy.kv_occupancy_weight * 100 * _kv_occupancy_ratio(c)
        + policy.active_weight * c.num_requests
        - policy.cache_match_weight * (c.matched_blocks > 0)
        + policy.memory_bandwidth_weight * 100 * c.memory_bandwidth_ratio
        - policy.recent_prefix_weight * c.is_recent
        for c in candidates
    }


def _kv_occupancy_ratio(candidate: DecodeCandidate) -> float:
    total_blocks = candidate.total_blocks
    return min(1.0, candidate.decode_blocks / total_blocks) if total_blocks else 0.0
