"""Child processes, each in a session of its own and logging to its own file.

A session is named by its leader's pid, which is not reused while a member lives: killing a session
never hits another process, and a restart begins after the rest of its session was killed.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from pdcluster_schema.backoff import Backoff

_LAUNCHER = Path(__file__).with_name("launcher.py")
_TAIL_BYTES = 8192


@dataclass(frozen=True)
class Launch:
    """environment: over ours."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


async def spawn(launch: Launch) -> asyncio.subprocess.Process:
    """Raises OSError when it cannot be started."""
    with launch.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())),
            *launch.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )


def session_members(leader: int) -> list[int]:
    return [pid for pid in psutil.pids() if _session_of(pid) == leader]


def kill_session(leader: int) -> int:
    """SIGKILL to all members; returns how many there were."""
    members = session_members(leader)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(members)


def last_lines(log: Path, count: int) -> list[str]:
    """Without empty lines; none when the file cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-count:]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


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


_END_SECONDS = 5.0  # to close files; later it is killed


@contextlib.asynccontextmanager
async def running(launch: Launch, report: Report) -> AsyncIterator[ManagedProcess]:
    """A program that is no worker, started again whenever it ends."""
    managed = ManagedProcess(launch, report)
    task = asyncio.create_task(managed.run())
    try:
        yield managed
    finally:
        managed.stop()
        await asyncio.wait({task}, timeout=_END_SECONDS)
        managed.kill()
        await asyncio.gather(task, return_exceptions=True)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


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

    def drain(self) -> None:
        """SIGTERM to all."""
        for managed in self.managed_processes:
            managed.stop()

    async def wait_drained(
        self, hurry: asyncio.Event, drain_seconds: float = DRAIN_SECONDS
    ) -> None:
        """SIGKILL to the rest when `hurry` is set or after `drain_seconds`."""
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
