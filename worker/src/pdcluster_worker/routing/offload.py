"""The offload decision: prefill a prompt locally or at a prefill worker, by uncached tokens."""

from dataclasses import dataclass, replace

from pdcluster_schema.policy import OffloadPolicy

MARGIN = 0.1  # the other side must be faster by this: estimates are no better


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadFacts:
    """Times are 0 until they are measured."""

    prompt_tokens: int  # to prefill, with the output so far of a migrated request
    cached_tokens: int = 0  # in this worker's prefix cache, requests in flight included
    prefill_queue: int = 0  # requests in the prefill queue, over all workers
    decode_active: int = 0
    decode_ratio: float = 0.0  # share of this worker's KV blocks in use
    transfer_seconds: float = 0.0
    local_seconds: float = 0.0  # measured time to first token (`ttft.TtftEstimates`)
    remote_seconds: float = 0.0  # measured time to first token (`ttft.TtftEstimates`)

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)

    @property
    def when_idle(self) -> "OffloadFacts":
        """The same prompt with both pools idle; a prefill_queue of -1 passes any bound, even 0."""
        idle = replace(self, prefill_queue=-1, decode_active=0, decode_ratio=0.0)
        return replace(idle, local_seconds=0.0, remote_seconds=0.0)


@dataclass(frozen=True, slots=True)
class OffloadDecision:
    is_remote: bool
    reason: str


def decide(policy: OffloadPolicy, facts: OffloadFacts, threshold: int) -> OffloadDecision:
    """threshold: uncached tokens, configured (`length_threshold`) or of `slo_feedback`."""
    if facts.uncached_tokens == 0:
        return OffloadDecision(False, "cached")
    busy = policy.decode_busy_ratio
    if busy is not None and facts.decode_ratio > busy:
        return OffloadDecision(True, "decode_busy")
    most = policy.max_transfer_milliseconds
    if most and 1000 * facts.transfer_seconds > most:
        return OffloadDecision(False, "transfer")
    match policy.policy:
        case "rule":
            return _by_rule(policy, facts, threshold)
        case "measured":
            return _guarded(policy, facts, _by_rule(policy, facts, threshold))
        case "sloFeedback":
            return _by_length(policy, facts, threshold)
        case "score":
            return OffloadDecision(
                score(policy, facts, threshold) > policy.score.min_score, "score"
            )


def takes_length(max_model_len: int, num_tokens: int) -> bool:
    """max_model_len: 0 = unknown.  One more token must fit."""
    return max_model_len == 0 or num_tokens < max_model_len


def length_threshold(policy: OffloadPolicy, gpu: str) -> int:
    """In uncached tokens, for a decode worker with that accelerator."""
    return policy.length_thresholds.get(gpu, policy.prefill_length_threshold)


def score(policy: OffloadPolicy, facts: OffloadFacts, threshold: int) -> float:
    """Sum of the weights whose metric is above its threshold.  With the default weights:

    >>> def at(prompt_tokens, prefill_queue):
    ...     facts = OffloadFacts(prompt_tokens=prompt_tokens, prefill_queue=prefill_queue)
    ...     return round(score(OffloadPolicy(), facts, 256), 3)
    >>> at(257, 10), at(257, 11), at(256, 0), at(256, 11)
    (0.7, 0.4, 0.0, -0.3)
    """
    weights = policy.score
    transfer = 1000 * facts.transfer_seconds
    return (
        weights.length_weight * (facts.uncached_tokens > threshold)
        + weights.decode_weight * (facts.decode_active > policy.decode_load_threshold)
        - weights.queue_weight * (facts.prefill_queue > policy.prefill_queue_max)
        - weights.transfer_weight * (transfer > weights.transfer_milliseconds)
    )


def _guarded(
    policy: OffloadPolicy, facts: OffloadFacts, verdict: OffloadDecision
) -> OffloadDecision:
    """The rule's decision, unless the other side is measured to be faster by MARGIN.

    The transfer counts as remote time, since the second token waits for it.

    >>> def guarded(is_remote, local, remote, prompt_tokens=300):
    ...     facts = OffloadFacts(prompt_tokens=prompt_tokens, local_seconds=local,
    ...     remote_seconds=remote)
    ...     return _guarded(OffloadPolicy(), facts, OffloadDecision(is_remote, "rule")).reason
    >>> guarded(True, 1.0, 1.1), guarded(True, 1.0, 1.2), guarded(True, 1.0, 0.0)
    ('rule', 'slower', 'rule')
    >>> guarded(False, 1.1, 1.0), guarded(False, 1.2, 1.0), guarded(False, 1.2, 1.0,
    ...     prompt_tokens=63)
    ('rule', 'faster', 'rule')
    """
    local, remote = facts.local_seconds, facts.remote_seconds + facts.transfer_seconds
    if not facts.local_seconds or not facts.remote_seconds:
        return verdict
    if verdict.is_remote and remote > (1 + MARGIN) * local:
        return OffloadDecision(False, "slower")
    is_long_enough = facts.uncached_tokens >= policy.min_offload_length
    if not verdict.is_remote and is_long_enough and local > (1 + MARGIN) * remote:
        return OffloadDecision(True, "faster")
    return verdict


def _by_rule(policy: OffloadPolicy, facts: OffloadFacts, threshold: int) -> OffloadDecision:
    """Offload long prompts while the prefill queue is short, and shorter ones when decode is busy.

    >>> def goes(prompt_tokens, **others):
    ...     facts = OffloadFacts(prompt_tokens=prompt_tokens, **others)
    ...     return _by_rule(OffloadPolicy(), facts, 256).is_remote
    >>> goes(255), goes(256), goes(300, cached_tokens=48)
    (False, True, False)
    >>> goes(256, prefill_queue=9), goes(256, prefill_queue=10)
    (True, False)
    >>> goes(256, prefill_queue=10, decode_active=8), goes(63, decode_active=8)
    (True, False)
    """
    by_length = _by_length(policy, facts, threshold)
    is_busy = facts.decode_active >= policy.decode_load_threshold
    if not by_length.is_remote and is_busy and facts.uncached_tokens >= policy.min_offload_length:
        return OffloadDecision(True, "decode_load")
    return by_length


def _by_length(policy: OffloadPolicy, facts: OffloadFacts, threshold: int) -> OffloadDecision:
    if facts.uncached_tokens < threshold:
        return OffloadDecision(False, "short")
    has_capacity = facts.prefill_queue < policy.prefill_queue_max
    return OffloadDecision(has_capacity, "long" if has_capacity else "queue")
