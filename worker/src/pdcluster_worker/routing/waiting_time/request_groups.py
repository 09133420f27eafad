"""Request groups of QLM: which of them wait so that fewer requests of all are late.

A worker serves its groups by priority, then by deadline (EDF).  Groups that are deferred go behind
the others of their priority.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

UNDATED = "none"
OTHER = "other"


def slo_class(slo_seconds: float | None, granularity_seconds: float) -> str:
    """The name of the SLO, rounded down, at least to one step of the granularity.

    >>> [slo_class(seconds, 100) for seconds in (430, 20, None)]
    ['400s', '100s', 'none']
    """
    if slo_seconds is None:
        return UNDATED
    return f"{max(1, int(slo_seconds / granularity_seconds)) * granularity_seconds:g}s"


class Labels:
    """Bounds metric labels: the first `most` group names, all later ones are OTHER."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._names and len(self._names) >= self._most:
            return OTHER
        self._names.add(name)
        return name


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Unfinished requests of one SLO class that are due in the same step; times are of the
    caller's clock.
    """

    name: str
    num_requests: int  # running ones included
    first_due_seconds: float  # by which its turn comes
    last_due_seconds: float = inf  # inf = none of it has a deadline: it is never late
    priority: int = 0
    seconds: float = 0.0  # T(n): from the start of its first request to the end of its last
    work_seconds: float = 0.0  # part of it after which the next group has all slots
    may_be_deferred: bool = True


def in_order(groups: Iterable[RequestGroup], deferred: Collection[str]) -> list[RequestGroup]:
    return sorted(groups, key=lambda g: (g.priority, g.name in deferred, g.first_due_seconds))


def forecasts(
    groups: Iterable[RequestGroup], deferred: Collection[str], now: float
) -> Iterator[tuple[RequestGroup, float]]:
    """Each group with the time of its end, in the order of service."""
    start = now
    for group in in_order(groups, deferred):
        yield group, start + group.seconds
        start += group.work_seconds


def num_late(groups: Iterable[RequestGroup], deferred: Collection[str], now: float) -> int:
    """Requests of the groups that would be late."""
    return _cost(groups, deferred, now)[0]


def _cost(
    groups: Iterable[RequestGroup], deferred: Collection[str], now: float
) -> tuple[int, float]:
    number, seconds = 0, 0.0
    for group, end in forecasts(groups, deferred, now):
        if end > group.last_due_seconds:
            number += group.num_requests
            seconds += end - group.last_due_seconds
    return number, seconds


MAX_EXACT = 7  # groups of which all subsets are tried: 128 of them, about a millisecond


def least_late(groups: Sequence[RequestGroup], now: float) -> frozenset[str]:
    """The groups to defer for the fewest late requests, then the least lateness, then the fewest
    groups.  Beyond MAX_EXACT groups those of the longest answers are deferred (Moore and Hodgson).
    """
    if num_late(groups, (), now) == 0:
        return frozenset()
    able = [group.name for group in groups if group.may_be_deferred]
    if len(able) > MAX_EXACT:
        candidates: Iterable[frozenset[str]] = (frozenset(), _without_longest(groups, now))
    else:
        candidates = (
            frozenset(names)
            for number in range(len(able) + 1)
            for names in combinations(able, number)
        )
    return min(candidates, key=lambda deferred: _cost(groups, deferred, now))


def _without_longest(groups: Sequence[RequestGroup], now: float) -> frozenset[str]:
    """Whenever a group is late, the one with most seconds a request is deferred."""
    kept: list[RequestGroup] = []
    deferred: set[str] = set()
    start = now
    for group in in_order(groups, ()):
        kept.append(group)
        end, start = start + group.seconds, start + group.work_seconds
        able = [other for other in kept if other.may_be_deferred]
        if end > group.last_due_seconds and able:
            longest = max(able, key=lambda g: g.work_seconds / g.num_requests)
            deferred.add(longest.name)
            kept.remove(longest)
            start -= longest.work_seconds
    return frozenset(deferred)


def replan(groups: Sequence[RequestGroup], deferred: frozenset[str], now: float) -> frozenset[str]:
    """The groups to defer from now on, changed only if fewer requests are late: each change costs
    the requests that it takes out of the engine.
    """
    kept = frozenset(g.name for g in groups if g.may_be_deferred and g.name in deferred)
    late = num_late(groups, kept, now)
    if late == 0:
        return kept
    best = least_late(groups, now)
    return best if num_late(groups, best, now) < late else kept
