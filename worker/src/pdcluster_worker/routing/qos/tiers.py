"""Priorities, lower first: below 0 is tier high, above 0 low.  Workers exchange only numbers."""

from collections.abc import Mapping

from pdcluster_schema.qos import Tier

PRIORITIES: Mapping[str, int] = {"high": -100, "normal": 0, "low": 100}

TIERS: tuple[Tier, ...] = ("high", "normal", "low")


class PriorityError(ValueError):
    """The request may not have this priority; the message says what it may have."""


def tier_of(priority: int) -> Tier:
    """Below 0 is high, above 0 low.

    >>> [tier_of(priority) for priority in (-1000, -1, 0, 1, 1000)]
    ['high', 'high', 'normal', 'low', 'low']
    """
    return "high" if priority < 0 else "low" if priority > 0 else "normal"


def priority_of(requested: int | None, ceiling: Tier | None, *, client_decides: bool) -> int:
    """ceiling: the tenant's highest tier and default; None = no ceiling.  Raises PriorityError."""
    default = PRIORITIES[ceiling or "normal"]
    if requested is None or requested == default:
        return default
    if not client_decides:
        raise PriorityError(
            f"priority: {requested} is not allowed here: leave it out, or set "
            "qos.allowClientPriority of the PDCluster"
        )
    if ceiling is not None and TIERS.index(tier_of(requested)) < TIERS.index(ceiling):
        raise PriorityError(
            f"priority: {requested} is {tier_of(requested)}, and the highest of this API key is "
            f"{ceiling}: leave it out or ask for a lower one"
        )
    return requested
