"""Clusters that take connections and answer nothing: requests for them end at once for a while."""

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdcluster_schema.backoff import Backoff
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.handed_on import MUTE_STATUS, HandedOn

PAUSE = Backoff(first=1.0, most=30.0)
"""Before one request looks whether a cluster answers again."""

_WHAT = "not an earlier request, nor /health"


class MuteClusters:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By address: failures in a row, and when the next look is due.
        self._found: dict[str, tuple[int, float]] = {}

    @asynccontextmanager
    async def noted(self, call: HandedOn) -> AsyncIterator[None]:
        """For the answer to a call.  Raises RequestError where its cluster has been mute."""
        await self._check(call)
        try:
            yield
        except RequestError as e:
            if e.status == MUTE_STATUS:
                self._note(call.address)
            raise

    async def _check(self, call: HandedOn) -> None:
        num_failures, due = self._found.get(call.address, (0, -math.inf))
        if self._clock() < due:
            raise call.mute(_WHAT)
        if num_failures:
            self._found[call.address] = (num_failures, math.inf)  # others do not look meanwhile
            try:
                is_mute = await call.is_mute()
            finally:
                self._note(call.address)
            if is_mute:
                raise call.mute(_WHAT)
            del self._found[call.address]

    def _note(self, address: str) -> None:
        """Once, though many calls end."""
        num_failures, due = self._found.get(address, (0, -math.inf))
        if due == math.inf or self._clock() >= due:
            num_failures += 1
            self._found[address] = (num_failures, self._clock() + PAUSE.after(num_failures))
