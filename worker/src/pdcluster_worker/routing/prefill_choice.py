"""Prefill workers as a decode worker sees them: credits, costs, link rates, remote prefills."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from random import Random

from pdcluster_schema.routing import PrefillScoreSpec

REQUESTING_HEADS = 8  # more would only lengthen the queues of prefill workers


@dataclass(frozen=True, slots=True)
class _QueuePosition:
    queue: str
    order: tuple[int, int]
    tokens: int


class CreditQueue:
    """Requests of a decode worker that wait for a credit, by (priority, arrival)."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._places: dict[str, _QueuePosition] = {}
        self._queues: dict[str, list[tuple[tuple[int, int], str]]] = {}
        self._num_tokens = 0

    def add(self, request_id: str, tokens: int, priority: int, only: str = "") -> None:
        """only: key of the one prefill worker that it may go to; empty = any."""
        if request_id in self._places:
            return
        place = _QueuePosition(only, (priority, next(self._arrivals)), tokens)
        self._places[request_id] = place
        insort(self._queues.setdefault(only, []), (place.order, request_id), key=_order)
        self._num_tokens += tokens

    def discard(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is None:
            return
        queue = self._queues[place.queue]
        del queue[bisect_left(queue, place.order, key=_order)]
        if not queue:
            del self._queues[place.queue]
        self._num_tokens -= place.tokens

    def heads(self, n: int) -> list[str]:
        """The first n requests of each queue, in order."""
        first = sorted(entry for queue in self._queues.values() for entry in queue[:n])
        return [request_id for _, request_id in first]

    def tokens(self, request_id: str) -> int:
        """Raises KeyError for a request that does not wait."""
        return self._places[request_id].tokens

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    @property
    def num_requests(self) -> int:
        return len(self._places)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens


def _order(entry: tuple[tuple[int, int], object]) -> tuple[int, int]:
    return entry[0]


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    key: str
    matched_tokens: int  # of the prompt, in its prefix cache
    queued_tokens: int
    transfer_seconds: float = 0.0  # expected; 0 = not measured


def choose_prefill(
    policy: PrefillScoreSpec, candidates: Iterable[PrefillCandidate], tie: Random
) -> str:
    """The lowest cost of at least one candidate; a seeded draw decides ties."""
    costs = {
        c.key: policy.load_weight * c.queued_tokens
        - policy.prefix_weight * c.matched_tokens
        + policy.transfer_weight * 1000 * c.transfer_seconds
        for c in candidates
    }
    lowest = min(costs.values())
    # sorted, so that a draw does not depend on the candidates' order
    return tie.choice(sorted(key for key, cost in costs.items() if cost == lowest))


_NEWEST = 0.2  # weight of the newest transfer

MAX_PAIRS = 1024  # beyond it the pair measured first is dropped


class LinkRates:
    """Tokens a second of each prefill worker, as a fading average: computed, or moved from it."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def add(self, key: str, num_tokens: int, seconds: float) -> None:
        """seconds: 0 = too short to measure."""
        if seconds <= 0 or num_tokens <= 0:
            return
        rate, old = num_tokens / seconds, self._rates.get(key)
        self._rates[key] = rate if old is None else (1 - _NEWEST) * old + _NEWEST * rate
        if len(self._rates) > MAX_PAIRS:
            del self._rates[next(iter(self._rates))]

    def seconds(self, key: str, num_tokens: int) -> float:
        """0 = not measured yet."""
        rate = self._rates.get(key)
        return 0.0 if rate is None else num_tokens / rate


WINDOW_SECONDS = 300.0
_SLICE_SECONDS = 30.0


@dataclass(slots=True)
class _TimeSlice:
    start: float
    num_long: int = 0
    num_remote: int = 0


class RemoteRatio:
    """Share of remote prefills among recent long prompts; an idle worker keeps its last figures.

    >>> share = RemoteRatio()
    >>> for second, is_remote in ((0, False), (100, True), (310, True)):
    ...     share.add(second, is_remote=is_remote)
    >>> share.num_long, share.num_remote
    (2, 2)
    """

    def __init__(self) -> None:
        self._slices: deque[_TimeSlice] = deque()

    def add(self, now: float, *, is_remote: bool) -> None:
        """now: seconds of a monotonic clock."""
        if not self._slices or now - self._slices[-1].start >= _SLICE_SECONDS:
            self._slices.append(_TimeSlice(now))
        self._slices[-1].num_long += 1
        self._slices[-1].num_remote += is_remote
        while now - self._slices[0].start >= WINDOW_SECONDS:
            self._slices.popleft()

    @property
    def num_long(self) -> int:
        return sum(each.num_long for each in self._slices)

    @property
    def num_remote(self) -> int:
        return sum(each.num_remote for each in self._slices)
