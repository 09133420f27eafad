"""Exponential back-off between attempts, and tasks that end together."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from pdcluster_schema.backoff import Backoff

FIRST_BACKOFF_SECONDS = 0.1
RETRY = Backoff(first=FIRST_BACKOFF_SECONDS, most=2.0)


class Reconnect:
    """Back-off of one connection: `begin` before each attempt, `pause` after it."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._num_failures = 0
        self._began = self._clock()

    def begin(self) -> None:
        self._began = self._clock()

    async def pause(self, *, has_served: bool = False) -> None:
        """Wait before the next attempt, not long after a connection that has served for a while."""
        if has_served and self._clock() - self._began > RETRY.most:
            self._num_failures = 0
        self._num_failures += 1
        await asyncio.sleep(RETRY.after(self._num_failures))


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
