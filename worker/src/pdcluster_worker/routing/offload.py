"""The offload decision [O1]: prefill this request here, or at a prefill worker.

One pure function of four numbers and the policy.  It does not know which
prefill workers exist or have credit (`credits`), nor what the client forced:
the caller asks only for requests that may go either way.
"""

from pdcluster_worker.routing_config import OffloadPolicy


def should_offload(policy: OffloadPolicy, *, prompt_tokens: int, cached_tokens: int, prefill_queue: int, decode_active: int) -> bool:
    """Whether a remote prefill helps [O1].

    prompt_tokens:  tokens to prefill, those made so far of a moved request included.
    cached_tokens:  of them, what this worker's prefix cache holds.
    prefill_queue:  requests in the prefill queue, over all workers.
    decode_active:  requests that this worker's engine runs.

    A long prompt goes while the prefill queue is short; a busy decode worker
    sends shorter ones too, whatever the queue.  With the default numbers:

    >>> def decide(prompt_tokens, cached_tokens=0, prefill_queue=0, decode_active=0):
    ...     numbers = dict(cached_tokens=cached_tokens, prefill_queue=prefill_queue, decode_active=decode_active)
    ...     return should_offload(OffloadPolicy(), prompt_tokens=prompt_tokens, **numbers)
    >>> decide(255), decide(256), decide(300, cached_tokens=48)
    (False, True, False)
    >>> decide(256, prefill_queue=9), decide(256, prefill_queue=10)
    (True, False)
    >>> decide(256, prefill_queue=10, decode_active=8), decide(64, decode_active=8), decide(63, decode_active=8)
    (True, True, False)
    """
    uncached_tokens = max(0, prompt_tokens - cached_tokens)
    is_long = is_long_prompt(policy, uncached_tokens) and prefill_queue < policy.prefill_queue_max
    is_relief = decode_active >= policy.decode_load_threshold and uncached_tokens >= policy.min_offload_length
    return is_long or is_relief


def is_long_prompt(policy: OffloadPolicy, uncached_tokens: int) -> bool:
    """Whether a prompt is worth a remote prefill by its length alone."""
    return uncached_tokens >= policy.prefill_length_threshold
