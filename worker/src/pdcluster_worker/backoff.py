"""Exponential back-off between attempts, and tasks that end together."""

import asyncio
from collections.abc import Coroutine
from typing import Any

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0


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


class Reconnect:
    """Back-off of one connection: `begin` before each attempt, `pause` after it."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        self._began = self._clock()

    def begin(self) -> None:
        self._began = self._clock()

    async def pause(self, *, has_served: bool = False) -> None:
        """Wait before the next attempt, not long after a connection that has served for a while."""
        if has_served and self._clock() - self._began > LAST_BACKOFF_SECONDS:
            self._backoff.reset()
        await asyncio.sleep(self._backoff.next_seconds())


async def run_until_first_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all; when one ends or this task is cancelled, cancel the others.  Raises what the first
    raised.

    Python 3.11's TaskGroup loses a cancellation that arrives while a part fails.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
