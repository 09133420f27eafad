"""Requests of a decode worker that wait for a credit, in (priority, arrival) order; lower priority
values go first.

It holds request ids and no blocks, and its sizes are this worker's part of the
prefill queue.  It does not know when a credit comes; that is the ledger's rule
(`credits`).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

ASKING_HEADS = 8
"""Requests at the head of the queue that ask for credit at the same time; more would only lengthen
the queues of the prefill workers.
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a request in the queue (`order` is unique) and the tokens that it waits for."""

    order: tuple[int, int]
    tokens: int


class CreditQueue:
    """An ordered set of requests with a token count each; arrival is the order of `add`."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._places: dict[str, _Place] = {}
        self._line: list[tuple[tuple[int, int], str]] = []
        self._num_tokens = 0

    def add(self, request_id: str, tokens: int, priority: int) -> None:
        """Put a request into the line; one that waits already keeps its place."""
        if request_id in self._places:
            return
        place = _Place((priority, next(self._arrivals)), tokens)
        self._places[request_id] = place
        insort(self._line, (place.order, request_id), key=_order)
        self._num_tokens += tokens

    def discard(self, request_id: str) -> None:
        """Take a request out of the line; unknown ones are a no-op."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        del self._line[bisect_left(self._line, place.order, key=_order)]
        self._num_tokens -= place.tokens

    def heads(self, n: int) -> list[str]:
        """The first n requests, or all when fewer wait."""
        return [request_id for _, request_id in self._line[:n]]

    def tokens(self, request_id: str) -> int:
        """Tokens that a waiting request waits for; KeyError for one that does not wait."""
        return self._places[request_id].tokens

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    @property
    def num_requests(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @property
    def num_tokens(self) -> int:
        """Tokens that they wait for, in all."""
        return self._num_tokens


def _order(entry: tuple[tuple[int, int], object]) -> tuple[int, int]:
    return entry[0]
