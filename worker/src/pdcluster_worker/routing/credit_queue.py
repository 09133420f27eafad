"""Requests of a decode worker that wait for a credit, in (priority, arrival) order; lower priority
values go first.

Those that name a prefill worker are a line of their own for each name, so that they hold up no
others.

It holds request ids and no blocks, and its sizes are this worker's part of the
prefill queue.  It does not know when a credit comes; that is the ledger's rule
(`credits`).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

REQUESTING_HEADS = 8
"""Requests of one line that ask for credit at the same time; more would only lengthen the queues of
the prefill workers.
"""


@dataclass(frozen=True, slots=True)
class _QueuePosition:
    """Place of a request in its line (`order` is unique) and the tokens that it waits for."""

    queue: str
    order: tuple[int, int]
    tokens: int


class CreditQueue:
    """An ordered set of requests with a token count each; arrival is the order of `add`."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._places: dict[str, _QueuePosition] = {}
        self._queues: dict[str, list[tuple[tuple[int, int], str]]] = {}
        self._num_tokens = 0

    def add(self, request_id: str, tokens: int, priority: int, only: str = "") -> None:
        """Put a request into its line; one that waits already keeps its place.

        only: key of the one prefill worker that it may go to; empty = any.
        """
        if request_id in self._places:
            return
        place = _QueuePosition(only, (priority, next(self._arrivals)), tokens)
        self._places[request_id] = place
        insort(self._queues.setdefault(only, []), (place.order, request_id), key=_order)
        self._num_tokens += tokens

    def discard(self, request_id: str) -> None:
        """Take a request out of its line; unknown ones are a no-op."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        queue = self._queues[place.queue]
        del queue[bisect_left(queue, place.order, key=_order)]
        if not queue:
            del self._queues[place.queue]
        self._num_tokens -= place.tokens

    def heads(self, n: int) -> list[str]:
        """The first n requests of each line, or all of it when fewer wait; in order."""
        first = sorted(entry for queue in self._queues.values() for entry in queue[:n])
        return [request_id for _, request_id in first]

    def tokens(self, request_id: str) -> int:
        """Tokens that a waiting request waits for; KeyError for one that does not wait."""
        return self._places[request_id].tokens

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    @property
    def num_requests(self) -> int:
        """Requests in all lines."""
        return len(self._places)

    @property
    def num_tokens(self) -> int:
        """Tokens that they wait for, in all."""
        return self._num_tokens


def _order(entry: tuple[tuple[int, int], object]) -> tuple[int, int]:
    return entry[0]
