"""A token bucket that caps how many bytes a second all connections send together."""

import threading

BURST_SECONDS = 0.01
"""Unused allowance that is kept: enough to make good for the kernel's millisecond timers."""


class TokenBucket:
    """Shared by the sender threads.  rate: bytes per second, 0 = no cap."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay(self, now: float) -> float:
        """Seconds until the next frame may start; 0.0 = now."""
        with self._lock:
            return max(0.0, self._free_at - now) if self._rate else 0.0

    def spend(self, num_bytes: int, now: float) -> None:
        if self._rate:
            with self._lock:
                self._free_at = max(self._free_at, now - BURST_SECONDS) + num_bytes / self._rate
