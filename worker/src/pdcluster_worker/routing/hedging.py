"""Choose requests that run on two decode workers until their first token, and the second worker.

A race costs a prompt's computation, so it is for idle workers and for a share of the requests.
Pure: loads are given, and the share is counted in requests, not in time.
"""

from collections.abc import Mapping

from pdcluster_worker.config.migration import RacingPolicy

_WHOLE = 1 - 1e-9
"""Threshold of one race: ten times a tenth is a little less than one."""


class HedgeBudget:
    """Counts requests: each earns its share of a race, and one race at most is saved up."""

    def __init__(self) -> None:
        self._earned = 0.0

    def earn(self, policy: RacingPolicy) -> bool:
        """Note a request; whether it may race by its turn.

        >>> budget, policy = HedgeBudget(), RacingPolicy(enabled=True, max_ratio=0.5)
        >>> [budget.earn(policy) and not budget.spend() for _ in range(4)]
        [False, True, False, True]
        """
        self._earned = min(1.0, self._earned + policy.max_ratio)
        return self._earned >= _WHOLE

    def spend(self) -> None:
        """Note a race."""
        self._earned = 0.0


def hedge_target(policy: RacingPolicy, first: str, num_requests: Mapping[str, int]) -> str | None:
    """The worker that a request races on beside its first one; None = it does not race.

    num_requests: on each worker that takes new ones.  Both have `max_requests` at most.

    >>> policy = RacingPolicy(enabled=True, max_requests=2)
    >>> hedge_target(policy, "a", {"a": 2, "b": 1, "c": 0})
    'c'
    >>> hedge_target(policy, "a", {"a": 3, "b": 0}), hedge_target(policy, "a", {"a": 0, "b": 3})
    (None, None)
    >>> hedge_target(RacingPolicy(), "a", {"a": 0, "b": 0})
    """
    others = {key: num for key, num in num_requests.items() if key != first}
    if not policy.enabled or not others or num_requests.get(first, 0) > policy.max_requests:
        return None
    best = min(others, key=lambda key: (others[key], key))
    return best if others[best] <= policy.max_requests else None
