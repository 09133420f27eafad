"""Connecting again after a connection broke: to a peer, or to etcd."""

import asyncio

from pdcluster_worker.backoff import Backoff

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0


class Reconnect:
    """Back-off of one connection: `begin` before each attempt, `pause` after it."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        self._began = self._clock()

    def begin(self) -> None:
        """Note when the attempt begins."""
        self._began = self._clock()

    async def pause(self, *, has_served: bool = False) -> None:
        """Wait before the next attempt; a connection that served for a while is no reason to wait
        long.
        """
        if has_served and self._clock() - self._began > LAST_BACKOFF_SECONDS:
            self._backoff.reset()
        await asyncio.sleep(self._backoff.next_seconds())
