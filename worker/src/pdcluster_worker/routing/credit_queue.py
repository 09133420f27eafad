"""Requests of a decode worker that wait for a credit, by (priority, arrival)."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

REQUESTING_HEADS = 8  # more would only lengthen the queues of prefill workers


@dataclass(frozen=True, slots=True)
class _QueuePosition:
    queue: str
    order: tuple[int, int]
    tokens: int


class CreditQueue:
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
