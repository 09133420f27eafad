"""The bounds of a worker's queue: beyond them requests are refused before they reach the engine.

A wait that is bounded in tokens is bounded in time: the bound over the tokens
that a worker computes in a second is the longest wait for a first token.
"""

from pdcluster_worker.config.policy import AdmissionPolicy


def full(
    policy: AdmissionPolicy, num_queued: int, queued_tokens: int, num_tokens: int
) -> str | None:
    """Reason why a request of `num_tokens` is not taken beside those that wait; None when it is.

    They wait for their first token.  With none waiting a request is taken whatever its size: it
    would never find more room.
    """
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
    policy: AdmissionPolicy,
    num_queued: int,
    num_tokens: int,
    firsts_per_second: float,
    token_seconds: float | None,
) -> float | None:
    """Seconds until `full` takes the request that it has just refused, at the recent pace; None =
    unknown.

    num_queued:        requests that wait.
    num_tokens:        of their prompts and of the one that comes.
    firsts_per_second: requests that get their first token.
    token_seconds:     of waiting for each prompt token ahead.
    """
    seconds = []
    excess_requests = num_queued + 1 - policy.max_queued_requests
    if excess_requests > 0 and firsts_per_second > 0:
        seconds.append(excess_requests / firsts_per_second)
    excess_tokens = num_tokens - policy.max_queued_tokens
    if policy.max_queued_tokens and excess_tokens > 0 and token_seconds is not None:
        seconds.append(excess_tokens * token_seconds)
    return max(seconds, default=None)
