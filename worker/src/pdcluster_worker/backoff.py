"""Exponential back-off between attempts."""


class Backoff:
    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first = first_seconds
        self._max = max_seconds
        self._next = first_seconds

    def next_seconds(self) -> float:
        seconds, self._next = self._next, min(2 * self._next, self._max)
        return seconds

    def reset(self) -> None:
        self._next = self._first
