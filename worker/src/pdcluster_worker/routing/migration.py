"""Choose requests that have begun and may continue at another decode worker, and the worker.

A move is a new leg of the same choice: its prompt and what it has made so far go to the next
worker apart, so limits, penalties and draws go on by position.  Pure; what has happened to a
worker is seen in `serving.ingress.attempt`.
"""

from typing import Literal

from pdcluster_worker.config.migration import MovingPolicy

MigrationReason = Literal["lost", "stalled", "draining", "preempted"]
"""State of the worker that makes a request leave it."""

MigrationOutcome = Literal["moved", "nowhere", "refused"]
"""Another worker made the next token; none takes it; the policy, or the type of engine, does not
allow it."""


def may_migrate(policy: MovingPolicy, num_moves: int) -> bool:
    """Return whether a choice that has moved so often may move once more.

    >>> may_migrate(MovingPolicy(), 1), may_migrate(MovingPolicy(), 2)
    (True, False)
    """
    return policy.enabled and num_moves < policy.max_moves


def is_short_of_blocks(policy: MovingPolicy, num_preemptions: int) -> bool:
    """Return whether a request that its worker preempted so often should move.

    >>> policy = MovingPolicy(after_preemptions=2)
    >>> is_short_of_blocks(policy, 1), is_short_of_blocks(policy, 2)
    (False, True)
    >>> is_short_of_blocks(MovingPolicy(), 9)
    False
    """
    return policy.enabled and 0 < policy.after_preemptions <= num_preemptions


MIN_READ_TOKENS = 64
"""Fewer are computed in a step that runs anyway, in less time than a transfer takes to begin."""


def reads_kv(uncached_tokens: int) -> bool:
    """Return whether a request that moves should read the KV of so many tokens from the worker that
    it left.

    >>> reads_kv(64), reads_kv(63)
    (True, False)
    """
    return uncached_tokens >= MIN_READ_TOKENS


PUSH_SECONDS = 60.0
"""Longest time for which a prefill worker keeps blocks for a prefix that it is given."""


def pushes_prefix(lacking_tokens: int, transfer_seconds: float, compute_seconds: float) -> bool:
    """Return whether a decode worker gives a prefill worker the KV of so many tokens that this one
    lacks, since that is expected to take less time than to compute them, and half of PUSH_SECONDS
    at most; 0 = not measured.

    >>> pushes_prefix(64, 0.1, 0.2), pushes_prefix(64, 0.2, 0.1), pushes_prefix(63, 0.1, 0.2)
    (True, False, False)
    >>> pushes_prefix(64, 0.0, 0.0), pushes_prefix(64, 0.2, 0.0), pushes_prefix(64, 31.0, 0.0)
    (True, True, False)
    """
    is_slower = 0 < compute_seconds <= transfer_seconds
    is_slow = transfer_seconds > PUSH_SECONDS / 2
    return lacking_tokens >= MIN_READ_TOKENS and not is_slower and not is_slow


def is_held(held_tokens: int, num_tokens: int) -> bool:
    """Return whether a worker that a request left has enough of its KV to hand it over: at least
    half.

    What it lacks it computes, and it was left so that it need not.  The last tokens are lacking as
    a rule: they fill no block, or no report has named their block yet.

    >>> is_held(48, 90), is_held(48, 97)
    (True, False)
    """
    return 2 * held_tokens >= num_tokens


def has_capacity(free_blocks: int, needed_blocks: int) -> bool:
    """Return whether a worker takes a request that is short of blocks elsewhere: with as many left
    over.

    With just its own it would soon be preempted there, or preempt others.

    >>> has_capacity(20, 10), has_capacity(19, 10)
    (True, False)
    """
    return free_blocks >= 2 * needed_blocks


def attempt_id(request_id: str, num_attempts: int) -> str:
    """The id of a choice's leg after so many others: each is another request to a worker.

    Blocks of one leg are never taken for those of the next, also where both run on one worker.

    >>> attempt_id("r", 0), attempt_id("r", 2)
    ('r', 'r~2')
    """
    return f"{request_id}~{num_attempts}" if num_attempts else request_id
