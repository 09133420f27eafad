"""Hedged requests: run on two decode workers until the first token of either.

A hedge costs a second prefill, so it needs idle workers and is limited to a share of the requests.
"""

from collections.abc import Mapping

from pdcluster_schema.routing import RacingSpec

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
