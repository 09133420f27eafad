"""Child processes, each in a session of its own and logging to its own file.

A session is named by its leader's pid, which is not reused while a member lives: killing a session
never hits another process.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

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
