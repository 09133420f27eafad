"""The command of a stock engine as a child process: starts it, forwards its output, ends all of it.

Its processes do not notice the end of their parent.  So `python -m
pdcluster_worker.stock_engine.command COMMAND...` stands between: it kills the process group after
the command or the worker has ended.  SIGTERM terminates first; SIGUSR1 kills at once, for what runs
in the background may ignore SIGQUIT.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.system.process import terminate_with_parent

LAST_LINES = 12  # last lines of output in the reason of its end

GRACE_SECONDS = 10  # for the command to end after SIGTERM
STOP_SECONDS = GRACE_SECONDS + 5.0  # for the launcher to end all processes


class Command:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """environment: over this process's."""
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError where there is no such program."""
        if shutil.which(self._command[0]) is None:
            raise ConfigError(f"engine.vllm.command: there is no program {self._command[0]}")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdcluster_worker.stock_engine.command", *self._command),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read(), name="output of the stock engine")

    async def ended(self) -> str:
        """Returns how it ended, and its last lines."""
        assert self._process is not None, "only a started command ends"
        status = await self._process.wait()
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), 1.0)
        return f"its command ended with status {status}{self.last_lines()}"

    def last_lines(self) -> str:
        return f", after saying: {' | '.join(self._lines)}" if self._lines else ""

    def kill(self) -> None:
        """Kill it and its children at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)

    async def stop(self) -> None:
        """Terminate, then kill."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process is not None, "only a started command says something"
        output = self._process.stdout
        assert output is not None, "its output is a pipe"
        rest = b""
        while data := await output.read(65_536):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            *lines, rest = (rest + data).split(b"\n")
            self._lines.extend(text for line in lines if (text := _shown(line)))


def _shown(line: bytes) -> str:
    return line.decode(errors="replace").strip()[:300]


def main(command: list[str]) -> int:
    """Returns the command's exit status, 128 + n after signal n."""
    child: subprocess.Popen[bytes] | None = None
    early: list[Callable[[int, None], None]] = []  # signals while the child is being started

    def kill(_signal: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(kill)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def on_signal(_signal: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(on_signal)
            return
        child.terminate()
        signal.alarm(GRACE_SECONDS)

    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGUSR1, kill)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the worker sends SIGTERM
    terminate_with_parent()
    child = subprocess.Popen(command, process_group=0)
    for handler in early:
        handler(0, None)
    status = child.wait()
    kill(0, None)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
