"""Attempts of a request on decode workers: migration to another one, and hedging on two."""

from collections.abc import Mapping
from typing import Literal

from pdcluster_schema.routing import MovingSpec, RacingSpec

# why a request leaves its worker
MigrationReason = Literal["lost", "stalled", "draining", "preempted"]

# nowhere: no worker accepts it; refused: by the policy or the type of engine
MigrationOutcome = Literal["moved", "nowhere", "refused"]


def may_migrate(policy: MovingSpec, num_moves: int) -> bool:
    """Limit the migrations of one choice.

    >>> may_migrate(MovingSpec(), 1), may_migrate(MovingSpec(), 2)
    (True, False)
    """
    return policy.enabled and num_moves < policy.max_moves


def is_short_of_blocks(policy: MovingSpec, num_preemptions: int) -> bool:
    """Return whether a request that was preempted so often should migrate.

    >>> policy = MovingSpec(after_preemptions=2)
    >>> is_short_of_blocks(policy, 1), is_short_of_blocks(policy, 2)
    (False, True)
    >>> is_short_of_blocks(MovingSpec(), 9)
    False
    """
    return policy.enabled and 0 < policy.after_preemptions <= num_preemptions


MIN_READ_TOKENS = 64  # fewer are computed in a running step before a transfer could begin


def reads_kv(uncached_tokens: int) -> bool:
    """Return whether a migrated request reads its KV from the worker that it left.

    >>> reads_kv(64), reads_kv(63)
    (True, False)
    """
    return uncached_tokens >= MIN_READ_TOKENS


PUSH_SECONDS = 60.0  # longest time for which a prefill worker keeps blocks of a pushed prefix


def pushes_prefix(lacking_tokens: int, transfer_seconds: float, compute_seconds: float) -> bool:
    """Return whether a decode worker pushes a cached prefix to a prefill worker.

    Only if that is faster than to compute it, and takes at most half of PUSH_SECONDS; 0 = unknown.

    >>> pushes_prefix(64, 0.1, 0.2), pushes_prefix(64, 0.2, 0.1), pushes_prefix(63, 0.1, 0.2)
    (True, False, False)
    >>> pushes_prefix(64, 0.0, 0.0), pushes_prefix(64, 0.2, 0.0), pushes_prefix(64, 31.0, 0.0)
    (True, True, False)
    """
    is_slower = 0 < compute_seconds <= transfer_seconds
    is_slow = transfer_seconds > PUSH_SECONDS / 2
    return lacking_tokens >= MIN_READ_TOKENS and not is_slower and not is_slow


def is_held(held_tokens: int, num_tokens: int) -> bool:
    """Return whether the worker that a request left has at least half of its KV.

    The last tokens are usually missing: their block is not full or not reported yet.

    >>> is_held(48, 90), is_held(48, 97)
    (True, False)
    """
    return 2 * held_tokens >= num_tokens


def has_capacity(free_blocks: int, needed_blocks: int) -> bool:
    """Return whether a worker has twice the blocks needed; with fewer it would soon preempt.

    >>> has_capacity(20, 10), has_capacity(19, 10)
    (True, False)
    """
    return free_blocks >= 2 * needed_blocks


def attempt_id(request_id: str, num_attempts: int) -> str:
    """Each attempt has its own id, so that its blocks are never taken for those of another.

    >>> attempt_id("r", 0), attempt_id("r", 2)
    ('r', 'r~2')
    """
    return f"{request_id}~{num_attempts}" if num_attempts else request_id


_WHOLE = 1 - 1e-9  # ten times 0.1 is a little less than 1


class HedgeBudget:
    """Each request earns a share of a hedge; at most one is saved up."""

    def __init__(self) -> None:
        self._earned = 0.0

    def earn(self, policy: RacingSpec) -> bool:
        """Count a request; returns True when it may be hedged.

        >>> budget, policy = HedgeBudget(), RacingSpec(enabled=True, max_ratio=0.5)
        >>> [budget.earn(policy) and not budget.spend() for _ in range(4)]
        [False, True, False, True]
        """
        self._earned = min(1.0, self._earned + policy.max_ratio)
        return self._earned >= _WHOLE

    def spend(self) -> None:
        self._earned = 0.0


def hedge_target(policy: RacingSpec, first: str, num_requests: Mapping[str, int]) -> str | None:
    """The second worker of a hedged request, or None; both have at most `max_requests`.

    >>> policy = RacingSpec(enabled=True, max_requests=2)
    >>> hedge_target(policy, "a", {"a": 2, "b": 1, "c": 0})
    'c'
    >>> hedge_target(policy, "a", {"a": 3, "b": 0}), hedge_target(policy, "a", {"a": 0, "b": 3})
    (None, None)
    >>> hedge_target(RacingSpec(), "a", {"a": 0, "b": 0})
    """
    others = {key: num for key, num in num_requests.items() if key != first}
    if not policy.enabled or not others or num_requests.get(first, 0) > policy.max_requests:
        return None
    best = min(others, key=lambda key: (others[key], key))
    return best if others[best] <= policy.max_requests else None
