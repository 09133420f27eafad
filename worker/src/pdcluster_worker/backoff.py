"""The back-off between attempts: each pause twice the last one, up to a limit."""


class Backoff:
    """Pauses from `first_seconds` to `max_seconds`."""

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first = first_seconds
        self._max = max_seconds
        self._next = first_seconds

    def next_seconds(self) -> float:
        """Return the pause before the next attempt; the one after it is twice as long."""
        seconds, self._next = self._next, min(2 * self._next, self._max)
        return seconds

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._next = self._first
