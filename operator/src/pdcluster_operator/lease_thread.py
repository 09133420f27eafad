"""The Lease in a thread of its own, so that long work in the main loop costs no leadership. After a
loss the main loop stops at once; a process that does not is ended before another may lead.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_operator.lease import Leadership, LeaseTimes

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def _end_process() -> None:
    logger.error("ended at once: the work did not end in time after the lease was lost")
    os._exit(1)


@dataclass
class LeaseThread:
    """One candidate, as `Leadership`; runs while it is entered."""

    # makes the client of the API server, on the loop of the thread
    connect: Callable[[], Coroutine[Any, Any, ApiClient]]
    namespace: str
    name: str
    identity: str
    times: LeaseTimes = field(default_factory=LeaseTimes)
    end: Callable[[], None] = _end_process  # ends the process without asking its main loop
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop, repr=False)
    _thread: Thread = field(init=False, repr=False)
    _client: ApiClient = field(init=False, repr=False)
    _leadership: Leadership = field(init=False, repr=False)

    async def __aenter__(self) -> Self:
        self._thread = Thread(target=self._loop.run_forever, name="lease", daemon=True)
        self._thread.start()
        try:
            self._client = await self._run(self.connect())
        except BaseException:
            await self._stop()
            raise
        self._leadership = Leadership(
            self._client, self.namespace, self.name, self.identity, self.times
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._run(self._client.close())
        await self._stop()

    async def acquire(self) -> None:
        """Wait until this process is the leader."""
        await self._run(self._leadership.acquire())

    async def hold(self) -> None:
        """Renew the Lease; returns when the leadership is lost, and everything must stop."""
        await self._run(self._hold())

    async def release(self) -> None:
        await self._run(self._leadership.release())

    async def _hold(self) -> None:
        await self._leadership.hold()
        self._loop.call_later(self.times.lease - self.times.renew, self.end)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
