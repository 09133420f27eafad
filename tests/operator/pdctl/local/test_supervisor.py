"""Several processes kept, drained and killed together."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdctl.local.processes import Launch, Supervisor, last_lines

SERVE = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', "
    "flush=True); signal.pause()"
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile "
    "True: signal.pause()"
)
REFUSE = "import sys; print('error: bad model'); sys.exit(2)"


@pytest.fixture
def launch(tmp_path: Path) -> Callable[[str, str], Launch]:
    return lambda name, code: Launch(name, (sys.executable, "-c", code), tmp_path / f"{name}.log")


async def started(supervisor: Supervisor, wait_until: Callable[..., Any]) -> list[int]:
    supervisor.start()
    await wait_until(
        lambda: all(last_lines(keeper.launch.log, 1) for keeper in supervisor.managed_processes),
        "every process",
    )
    return [keeper.pid for keeper in supervisor.managed_processes if keeper.pid is not None]


async def test_supervisor_drains_all(
    launch: Callable[[str, str], Launch], wait_until: Callable[..., Any]
) -> None:
    said: list[str] = []
    supervisor = Supervisor([launch("a", SERVE), launch("b", SERVE)], said.append)
    pids = await started(supervisor, wait_until)
    supervisor.drain()
    await supervisor.wait_drained(asyncio.Event())

    assert len(pids) == 2
    assert [psutil.pid_exists(pid) for pid in pids] == [False, False]
    assert said == []
    assert await supervisor.wait_failed() is None


async def test_supervisor_kills_what_does_not_drain_when_hurried(
    launch: Callable[[str, str], Launch], wait_until: Callable[..., Any]
) -> None:
    said: list[str] = []
    supervisor = Supervisor([launch("a", SERVE), launch("b", STUBBORN)], said.append)
    pids = await started(supervisor, wait_until)
    hurry = asyncio.Event()
    supervisor.drain()
    stopping = asyncio.create_task(supervisor.wait_drained(hurry))
    await wait_until(
        lambda: supervisor.managed_processes[0].phase == "stopped", "the end of the one that drains"
    )
    hurry.set()
    await stopping

    assert said == ["killing b: not drained"]
    assert [psutil.pid_exists(pid) for pid in pids] == [False, False]


async def test_supervisor_kills_what_does_not_drain_in_time(
    launch: Callable[[str, str], Launch], wait_until: Callable[..., Any]
) -> None:
    supervisor = Supervisor([launch("a", STUBBORN)], lambda text: None)
    pids = await started(supervisor, wait_until)
    supervisor.drain()
    await supervisor.wait_drained(asyncio.Event(), drain_seconds=0.0)

    assert [psutil.pid_exists(pid) for pid in pids] == [False]


async def test_supervisor_returns_the_first_that_gives_up(
    launch: Callable[[str, str], Launch],
) -> None:
    supervisor = Supervisor([launch("a", SERVE), launch("b", REFUSE)], lambda text: None)
    supervisor.start()
    keeper = await supervisor.wait_failed()

    assert keeper is supervisor.managed_processes[1]
    assert keeper.last_error() == "bad model"
    supervisor.drain()
    await supervisor.wait_drained(asyncio.Event())
