"""`kvAware`: blocks to prefill, queued ones included, plus blocks held, less cached blocks."""

from collections.abc import Sequence

from pdcluster_schema.routing import KvAwareSpec
from pdcluster_worker.routing.decode_score.candidate import DecodeCandidate, RequestSize


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
    return (
        policy.prefill_load_scale * max(0.0, prefill_blocks - credit_blocks)
        + decode_blocks
        + active
    )


def kv_aware(
    policy: KvAwareSpec, request: RequestSize, candidates: Sequence[DecodeCandidate]
) -> dict[str, float]:
    least = min(c.prefill_tokens for c in candidates)
    return {
        c.key: cost(policy, request, c, _credit_at(policy, request, c, least)) for c in candidates
    }


def _credit_at(
    policy: KvAwareSpec,
    request: RequestSize,
    candidate: DecodeCandidate,
    least_prefill_tokens: int,
) -> float:
    if not candidate.matched_blocks:
        return 0.0
    lessened = decay(policy, request, candidate.prefill_tokens, least_prefill_tokens)
    return policy.overlap_credit * lessened * candidate.matched_blocks
