"""Bounds of a worker's queue: requests over them are refused before they reach the engine."""

from pdcluster_schema.qos import AdmissionSpec


def full(policy: AdmissionSpec, num_queued: int, queued_tokens: int, num_tokens: int) -> str | None:
    """Reason for a refusal, or None.  With an empty queue a request of any size is admitted."""
    if num_queued >= policy.max_queued_requests:
        return (
            f"{num_queued} requests wait for their first token (qos.admission.maxQueuedRequests is "
            f"{policy.max_queued_requests}): retry later"
        )
    if (
        policy.max_queued_tokens
        and num_queued
        and queued_tokens + num_tokens > policy.max_queued_tokens
    ):
        return (
            f"{queued_tokens} prompt tokens wait here, and {num_tokens} more are over "
            "qos.admission.maxQueuedTokens "
            f"({policy.max_queued_tokens}): retry later"
        )
    return None


def seconds_until_capacity(
    policy: AdmissionSpec,
    num_queued: int,
    num_tokens: int,
    firsts_per_second: float,
    token_seconds: float | None,
) -> float | None:
    """token_seconds: of waiting for each prompt token ahead.  None = unknown."""
    seconds = []
    excess_requests = num_queued + 1 - policy.max_queued_requests
    if excess_requests > 0 and firsts_per_second > 0:
        seconds.append(excess_requests / firsts_per_second)
    excess_tokens = num_tokens - policy.max_queued_tokens
    if policy.max_queued_tokens and excess_tokens > 0 and token_seconds is not None:
        seconds.append(excess_tokens * token_seconds)
    return max(seconds, default=None)
