"""Supervises the worker processes of one cluster: starts, drains and kills them together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from pdctl.local.processes import Launch, ManagedProcess, Report

# longer than any answer of a small machine should take; then it is killed and said so
DRAIN_SECONDS = 60.0
# a worker's exit code for a config file or a model that no restart can mend
CONFIGURATION_ERROR = 2


class Supervisor:
    """`managed_processes` are in the order of the launches."""

    def __init__(
        self,
        launches: Sequence[Launch],
        report: Report,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.managed_processes = tuple(
            ManagedProcess(
                launch,
                report,
                fatal_codes=frozenset({CONFIGURATION_ERROR}),
                sleep=sleep,
                clock=clock,
            )
            for launch in launches
        )
        self._report = report
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        self._tasks = tuple(
            asyncio.create_task(managed.run(), name=managed.launch.name)
            for managed in self.managed_processes
        )

    async def wait_failed(self) -> ManagedProcess | None:
        """The first process that fails for good; None when all were stopped.

        Raises OSError when a process cannot be started.
        """
        pending = set(self._tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            failed = [managed for managed in self.managed_processes if managed.phase == "failed"]
            if failed:
                return failed[0]
        return None

    async def stop(self, hurry: asyncio.Event, drain_seconds: float = DRAIN_SECONDS) -> None:
        """SIGTERM to all; SIGKILL to the rest when `hurry` is set or after `drain_seconds`."""
        for managed in self.managed_processes:
            managed.stop()
        if not await self._ended(hurry, drain_seconds):
            left = [
                managed.launch.name for managed in self.managed_processes if managed.pid is not None
            ]
            self._report(f"killing {', '.join(left)}: not drained")
            for managed in self.managed_processes:
                managed.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ended(self, hurry: asyncio.Event, seconds: float) -> bool:
        """False where `hurry` was set or the time was over first."""
        ended = asyncio.ensure_future(asyncio.wait(self._tasks))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({ended, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        hurried.cancel()
        return all(task.done() for task in self._tasks)
