"""Request groups: requests for one model whose deadlines are about the same.

A group is (model, deadline quantised by the granularity).  Its deadline is the
relative one of its requests, rounded down: none of them is served as if it had
more time than it has.  Requests without a deadline are one group of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

UNDATED = "none"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class GroupKey:
    """slo_seconds: a multiple of the granularity, at least one; inf = no deadline."""

    model: str
    slo_seconds: float = inf

    @property
    def name(self) -> str:
        """Short text, the same for equal keys: the model is left out, since a worker serves one."""
        return UNDATED if self.slo_seconds == inf else f"{self.slo_seconds:g}s"


def group_of(model: str, slo_seconds: float | None, granularity_seconds: float) -> GroupKey:
    """The group of a request that is to be complete in so many seconds.

    >>> group_of("chat", 430, 100).name, group_of("chat", 20, 100).name, group_of("chat", None,
    ...     100).name
    ('400s', '100s', 'none')
    """
    if slo_seconds is None:
        return GroupKey(model)
    steps = max(1, int(slo_seconds / granularity_seconds))
    return GroupKey(model, steps * granularity_seconds)


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of one group that are not complete.

    due_seconds:  when all of them are to be complete, of the caller's clock.
    num_requests: of it that are not complete, running ones included.
    """

    key: GroupKey
    due_seconds: float
    num_requests: int

    def grown(self, due_seconds: float, num_requests: int = 1) -> "RequestGroup":
        """The same with more requests; the earliest deadline counts for all."""
        return replace(
            self,
            due_seconds=min(self.due_seconds, due_seconds),
            num_requests=self.num_requests + num_requests,
        )


class Labels:
    """Bounds the label values that groups make: the first `most` names stand for themselves, all
    later ones are OTHER.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """The name, or OTHER when there are too many."""
        if name not in self._names and len(self._names) >= self._most:
            return OTHER
        self._names.add(name)
        return name


def by_deadline(groups: Sequence[RequestGroup]) -> list[RequestGroup]:
    """Earliest deadline first; equal ones keep their order."""
    return sorted(groups, key=lambda group: group.due_seconds)
