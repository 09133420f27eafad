"""Requests of one worker in order of service, as waiting-time estimators see them."""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol


@dataclass(slots=True, eq=False)
class QueuedRequest:
    group: str
    prompt_tokens: int  # to prefill, without those in the prefix cache
    max_tokens: int
    priority: int = 0
    due_seconds: float = float("inf")  # deadline by the caller's clock, or what stands for one
    num_tokens: int = 0  # output tokens so far
    due_group: str = ""  # with which it is deferred
    slo_seconds: float | None = None  # None = it has no deadline
    arrival_seconds: float = 0.0
    is_timed: bool = True  # False: it may have lost its slot for a time

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens > 0


@dataclass(slots=True)
class QueueAhead:
    """alike: (requests, sum of max_tokens) by group and bit length of max_tokens."""

    num_requests: int = 0
    prompt_tokens: int = 0
    alike: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def count(self, request: QueuedRequest, sign: int = 1) -> None:
        """sign: -1 removes it."""
        self.num_requests += sign
        self.prompt_tokens += sign * request.prompt_tokens
        kind = request.group, request.max_tokens.bit_length()
        number, tokens = self.alike.pop(kind, (0, 0))
        if number + sign:
            self.alike[kind] = number + sign, tokens + sign * request.max_tokens


class RequestQueue(Collection[QueuedRequest]):
    def __init__(self, requests: Iterable[QueuedRequest] = ()) -> None:
        self.running: dict[QueuedRequest, None] = {}
        self.by_group: Counter[str] = Counter()
        self.by_due_group: dict[str, dict[QueuedRequest, None]] = {}
        self._deferred: Collection[str] = ()
        self._waiting: list[QueuedRequest] = []
        self._totals = QueueAhead()  # of all that wait
        for request in requests:
            self.add(request)

    def add(self, request: QueuedRequest) -> None:
        self.by_group[request.group] += 1
        self.by_due_group.setdefault(request.due_group, {})[request] = None
        if request.is_decoding:
            self.running[request] = None
        else:
            insort(self._waiting, request, key=self._order)
            self._totals.count(request)

    def began(self, request: QueuedRequest) -> None:
        self._leave(request)
        self.running[request] = None

    def remove(self, request: QueuedRequest) -> None:
        self.by_group[request.group] -= 1
        if not self.by_group[request.group]:
            del self.by_group[request.group]  # clients choose deadlines, and so groups
        del self.by_due_group[request.due_group][request]
        if not self.by_due_group[request.due_group]:
            del self.by_due_group[request.due_group]
        if request in self.running:
            del self.running[request]
        else:
            self._leave(request)

    def defer(self, groups: Collection[str]) -> None:
        """Requests of these due groups, and of no others, wait behind those of their priority."""
        self._deferred = groups
        self._waiting.sort(key=self._order)

    def ahead(self, request: QueuedRequest) -> QueueAhead:
        """Totals of waiting requests that are served before a new one."""
        at = bisect_right(self._waiting, self._order(request), key=self._order)
        totals = self._totals
        found, counted, sign = QueueAhead(), self._waiting[:at], 1
        if 2 * at > len(self._waiting):  # fewer are behind it, most often none
            found = replace(totals, alike=dict(totals.alike))
            counted, sign = self._waiting[at:], -1
        for other in counted:
            found.count(other, sign)
        return found

    def __iter__(self) -> Iterator[QueuedRequest]:
        yield from self.running
        yield from self._waiting

    def __len__(self) -> int:
        return len(self.running) + len(self._waiting)

    def __contains__(self, request: object) -> bool:
        return request in self.running or request in self._waiting

    def _leave(self, request: QueuedRequest) -> None:
        self._waiting.remove(request)
        self._totals.count(request, -1)

    def _order(self, request: QueuedRequest) -> tuple[int, bool, float]:
        """Equal ones are in order of arrival."""
        return request.priority, request.due_group in self._deferred, request.due_seconds


@dataclass(frozen=True, slots=True)
class QueueState:
    requests: RequestQueue
    slots: int  # most requests that the engine runs at a time


@dataclass(frozen=True, slots=True)
class Completion:
    group: str
    prompt_tokens: int  # prefilled, without those in the prefix cache
    output_tokens: int
    prefill_seconds: float | None  # without waiting; None = unknown
    decode_seconds: float | None  # first token to last; None = with an eviction between
    batch: float = 1.0  # mean number of requests that decoded together


class GroupSeconds(NamedTuple):
    """Time that a group alone takes: until its last request ends, and until the next group has all
    slots.
    """

    total: float
    work: float


class Estimator(Protocol):
    """Estimates are seconds from now; None = no figures yet, and nothing is refused for it."""

    def estimated_ttft_seconds(self, request: QueuedRequest, queue: QueueState) -> float | None:
        """The request is not in the queue yet."""
        ...

    def estimated_completion_seconds(
        self, request: QueuedRequest, queue: QueueState
    ) -> float | None:
        """Until its last token."""
        ...

    def group_seconds(self, members: Sequence[QueuedRequest], slots: int) -> GroupSeconds | None:
        """Forecast T(n) for unfinished requests of one group, at least one."""
        ...

    def observe(self, completion: Completion) -> None:
        """Learn from a request that ended by itself."""
        ...
