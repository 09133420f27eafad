"""Delay before a process that ended is started again."""

FIRST_SECONDS = 1.0
LAST_SECONDS = 30.0
HEALTHY_SECONDS = 60.0  # a life this long is not part of a crash loop


class Backoff:
    """Doubling delays, from one second again after a healthy life."""

    def __init__(self) -> None:
        self._next_seconds = FIRST_SECONDS

    def after(self, lived_seconds: float) -> float:
        """Seconds to wait now that a life of so many seconds has ended."""
        if lived_seconds >= HEALTHY_SECONDS:
            self._next_seconds = FIRST_SECONDS
        delay = self._next_seconds
        self._next_seconds = min(LAST_SECONDS, delay * 2)
        return delay
