"""Request groups: requests for one model with about the same relative deadline (SLO)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

UNDATED = "none"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class GroupKey:
    model: str
    slo_seconds: float = inf  # rounded down to the granularity; inf = none

    @property
    def name(self) -> str:
        return UNDATED if self.slo_seconds == inf else f"{self.slo_seconds:g}s"


def group_of(model: str, slo_seconds: float | None, granularity_seconds: float) -> GroupKey:
    """Round the SLO down, at least to one step of the granularity.

    >>> [group_of("chat", seconds, 100).name for seconds in (430, 20, None)]
    ['400s', '100s', 'none']
    """
    if slo_seconds is None:
        return GroupKey(model)
    steps = max(1, int(slo_seconds / granularity_seconds))
    return GroupKey(model, steps * granularity_seconds)


@dataclass(frozen=True, slots=True)
class RequestGroup:
    key: GroupKey
    due_seconds: float  # deadline by the caller's clock
    num_requests: int  # unfinished, running ones included

    def grown(self, due_seconds: float, num_requests: int = 1) -> "RequestGroup":
        return replace(
            self,
            due_seconds=min(self.due_seconds, due_seconds),
            num_requests=self.num_requests + num_requests,
        )


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


def by_deadline(groups: Sequence[RequestGroup]) -> list[RequestGroup]:
    return sorted(groups, key=lambda group: group.due_seconds)
