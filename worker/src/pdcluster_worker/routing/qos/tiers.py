"""Tiers of priorities, and the priority of a request.

A priority is a number, lower first, and names stand for numbers; only the
number travels between workers.  Below 0 is high, above 0 is low.
"""

from collections.abc import Mapping

from pdcluster_worker.config.qos import Tier

PRIORITIES: Mapping[str, int] = {"high": -100, "normal": 0, "low": 100}
"""The number that each name stands for."""

TIERS: tuple[Tier, ...] = ("high", "normal", "low")


class PriorityError(ValueError):
    """A request asks for a priority that it may not have; the message says why and
    what it may do.
    """


def tier_of(priority: int) -> Tier:
    """The tier of a number.

    >>> [tier_of(priority) for priority in (-1000, -1, 0, 1, 1000)]
    ['high', 'high', 'normal', 'low', 'low']
    """
    return "high" if priority < 0 else "low" if priority > 0 else "normal"


def priority_of(requested: int | None, ceiling: Tier | None, *, client_decides: bool) -> int:
    """The priority of a request.  Raises PriorityError.

    requested:      by the request itself; None = nothing.
    ceiling:        the highest tier of its tenant, and what it has unasked; None = normal unasked,
                    and no ceiling.
    client_decides: whether what it asks for counts.
    """
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
