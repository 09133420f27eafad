"""Timeout of KV fetches, by vLLM's metrics; a fetch in vLLM's queue is not timed.

The metrics say how many fetches wait, run and have arrived, not which: in order of the queue,
except one that a later fetch has overtaken, whose KV hangs.
"""

import math

FETCH_SECONDS = 30.0  # as long as a prefill engine keeps KV that is not requested


class Fetches:
    """Fetches of one engine that have no token yet."""

    def __init__(self) -> None:
        self._fetches: dict[str, tuple[int, float]] = {}  # (priority, when the engine got it)
        self._begun: dict[str, float] = {}  # since when, of those that have left the queue
        self._overtaken: set[str] = set()  # begun ones before which a later one had its token
        self._num_complete = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def begun(self, request_id: str, priority: int, now: float) -> None:
        """The engine has the request, with a peer's KV."""
        self._fetches[request_id] = priority, now

    def ended(self, request_id: str) -> None:
        """The KV has arrived or is not expected any more."""
        self._overtaken.discard(request_id)
        priority, _ = self._fetches.pop(request_id, (0, 0.0))
        since = self._begun.pop(request_id, -math.inf)
        self._overtaken |= {
            one
            for one, begun in self._begun.items()
            if begun < since and self._fetches[one][0] <= priority
        }

    def seen(self, num_to_start: int, num_complete: int, requested_at: float) -> None:
        """num_to_start: fetches in the queue.  num_complete: arrived, without a token yet."""
        known = {one: place for one, place in self._fetches.items() if place[1] <= requested_at}
        in_order = sorted(known, key=lambda one: (self._begun.get(one, math.inf), known[one]))
        begun = in_order[: max(0, len(known) - num_to_start)]
        self._begun = {one: self._begun.get(one, requested_at) for one in begun}
        self._num_complete = num_complete

    def overdue(self, now: float) -> list[str]:
        """Requests whose fetch has timed out."""
        in_order = sorted(self._begun, key=lambda one: (one in self._overtaken, self._begun[one]))
        under_way = in_order[self._num_complete :]
        return [one for one in under_way if now - self._begun[one] >= FETCH_SECONDS]
