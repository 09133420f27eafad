"""A supervised process: restarted with backoff until stopped.

Exit codes in `fatal_codes` are not retried: the same input would fail again.  The rest of its
session is killed before a restart, so two runs never overlap.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from pdcluster_schema.backoff import Backoff
from pdctl.local.processes import Launch, kill_session, last_lines, spawn

Phase = Literal["running", "draining", "waiting", "failed", "stopped"]
Report = Callable[[str], None]
_LAST_LINES = 3
RESTART = Backoff(first=1.0, most=30.0)
HEALTHY_SECONDS = 60.0  # a life this long is not part of a crash loop


class ManagedProcess:
    """A process and its restarts.

    phase: running, draining, waiting (for a restart), failed or stopped
    pid:   of the running process, also its session; None between restarts
    """

    def __init__(
        self,
        launch: Launch,
        report: Report,
        *,
        fatal_codes: frozenset[int] = frozenset(),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.launch = launch
        self.phase: Phase = "waiting"
        self.pid: int | None = None
        self.num_starts = 0
        self._report = report
        self._fatal_codes = fatal_codes
        self._sleep = sleep
        self._clock = clock
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run until stopped or failed.  Raises OSError when the process cannot be started."""
        num_short_runs = 0
        while not self._stopping.is_set():
            began = self._clock()
            code = await self._run_once()
            if self._stopping.is_set():
                break
            if code in self._fatal_codes:
                self.phase = "failed"
                self._report(
                    f"{self.launch.name} ended with {describe_exit(code)} and is not started "
                    f"again: {self.last_error()}"
                )
                return
            num_short_runs = 1 if self._clock() - began >= HEALTHY_SECONDS else num_short_runs + 1
            delay = RESTART.after(num_short_runs)
            self.phase = "waiting"
            self._report(
                f"{self.launch.name} ended with {describe_exit(code)}, starts again in {delay:g} "
                f"s; {self._last_output()}"
            )
            await self._wait(delay)
        self.phase = "stopped"

    def stop(self) -> None:
        """Send SIGTERM and do not restart; `run` returns when the process has ended."""
        self._stopping.set()
        self._drain()

    def kill(self) -> None:
        self._stopping.set()
        if self.pid is not None:
            kill_session(self.pid)

    def last_error(self) -> str:
        """The last line of the log that begins with `error:`, without that word; else the last
        line.
        """
        lines = last_lines(self.launch.log, 50)
        errors = [line for line in lines if line.startswith("error:")]
        return (
            (errors or lines or [f"nothing in {self.launch.log}"])[-1]
            .removeprefix("error:")
            .strip()
        )

    async def _run_once(self) -> int:
        process = await spawn(self.launch)
        self.pid, self.phase = process.pid, "running"
        self.num_starts += 1
        if self._stopping.is_set():  # stopped while the process was being made
            self._drain()
        try:
            return await process.wait()
        finally:
            kill_session(process.pid)
            self.pid = None

    async def _wait(self, seconds: float) -> None:
        waits = [
            asyncio.ensure_future(self._sleep(seconds)),
            asyncio.ensure_future(self._stopping.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _drain(self) -> None:
        """To the leader only: it ends its own children."""
        if self.pid is not None:
            self.phase = "draining"
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def _last_output(self) -> str:
        lines = last_lines(self.launch.log, _LAST_LINES)
        words = "\n    ".join(["last lines of its log:", *lines]) if lines else "its log is empty"
        return f"{words}\n    ({self.launch.log})"


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
