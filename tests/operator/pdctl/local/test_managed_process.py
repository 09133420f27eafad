"""One process kept running: real processes, a sleep and a clock of the test's own."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdctl.local.processes import (
    RESTART,
    Launch,
    ManagedProcess,
    describe_exit,
    kill_session,
    last_lines,
    session_members,
)


class Time:
    """A clock that moves only when it is moved; its sleeps return at once and are counted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[[str], Launch]:
    return lambda code: Launch("worker", (sys.executable, "-c", code), tmp_path / "worker.log")


def test_backoff_doubles_to_30_seconds() -> None:
    assert [RESTART.after(number) for number in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


async def test_keeper_starts_a_dead_process_again_and_logs_its_last_lines(
    launch: Callable[[str], Launch],
) -> None:
    time, said = Time(), []

    def report(text: str) -> None:
        said.append(text)
        if len(said) == 4:
            keeper.stop()

    keeper = ManagedProcess(
        launch("print('one'); print('two'); raise SystemExit(3)"),
        report,
        sleep=time.sleep,
        clock=time.clock,
    )
    await keeper.run()

    assert time.slept[:3] == [1, 2, 4]
    assert keeper.num_starts == 4
    assert keeper.phase == "stopped"
    assert said[0].startswith(
        "worker ended with code 3, starts again in 1 s; last lines of its log:\n    one\n    two\n "
        "   ("
    )


async def test_keeper_forgets_a_crash_loop_after_a_healthy_life(
    launch: Callable[[str], Launch],
) -> None:
    time, said = Time(), []
    time_steps = itertools.cycle([0.0, 0.0, 0.0, 61.0])  # began, ended, began, ended

    def clock() -> float:
        time.now += next(time_steps)
        return time.now

    def report(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            keeper.stop()

    keeper = ManagedProcess(launch("raise SystemExit(1)"), report, sleep=time.sleep, clock=clock)
    await keeper.run()

    assert [text.split("again in ")[1].split(";")[0] for text in said] == ["1 s", "1 s", "2 s"]


async def test_keeper_gives_up_on_a_configuration_error(launch: Callable[[str], Launch]) -> None:
    said: list[str] = []
    code = "import sys; sys.stderr.write('error: no such model\\nbye\\n'); sys.exit(2)"
    keeper = ManagedProcess(launch(code), said.append, fatal_codes=frozenset({2}))
    await keeper.run()

    assert (keeper.phase, keeper.num_starts, keeper.last_error()) == ("failed", 1, "no such model")
    assert said == ["worker ended with code 2 and is not started again: no such model"]


async def test_keeper_stop_drains_with_sigterm(
    launch: Callable[[str], Launch], wait_until: Callable[..., Any]
) -> None:
    said: list[str] = []
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('drained'), "
        "sys.exit(0)));"
        "print('up', flush=True); signal.pause()"
    )
    keeper = ManagedProcess(launch(code), said.append)
    running = asyncio.create_task(keeper.run())
    await wait_until(lambda: last_lines(keeper.launch.log, 1) == ["up"], "the process")
    keeper.stop()
    await running

    assert last_lines(keeper.launch.log, 1) == ["drained"]
    assert (said, keeper.phase, keeper.pid) == ([], "stopped", None)


async def test_keeper_stop_ends_a_wait(
    launch: Callable[[str], Launch], wait_until: Callable[..., Any]
) -> None:
    async def forever(seconds: float) -> None:
        await asyncio.Event().wait()

    keeper = ManagedProcess(launch("raise SystemExit(1)"), lambda text: None, sleep=forever)
    running = asyncio.create_task(keeper.run())
    await wait_until(lambda: keeper.num_starts == 1 and keeper.phase == "waiting", "the wait")
    keeper.stop()
    await running

    assert (keeper.phase, keeper.num_starts) == ("stopped", 1)


async def test_keeper_kills_what_a_dead_leader_left(
    launch: Callable[[str], Launch], wait_until: Callable[..., Any], tmp_path: Path
) -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    code = (
        "import os, signal, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', "
        f"{child!r}]);"
        "print(p.pid, flush=True); signal.pause()"
    )
    keeper = ManagedProcess(launch(code), lambda text: None)
    running = asyncio.create_task(keeper.run())
    await wait_until(lambda: last_lines(keeper.launch.log, 1), "the child")
    orphan = int(last_lines(keeper.launch.log, 1)[0])
    leader = keeper.pid
    assert leader is not None
    assert sorted(session_members(leader)) == sorted([leader, orphan])

    keeper.stop()
    await running
    await wait_until(
        lambda: (
            not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
        ),
        "its end",
    )


async def test_keeper_raises_when_nothing_can_be_started(tmp_path: Path) -> None:
    keeper = ManagedProcess(
        Launch("worker", (sys.executable,), tmp_path / "missing" / "log"), lambda text: None
    )
    with pytest.raises(FileNotFoundError):
        await keeper.run()


async def test_process_without_a_program_says_so_in_its_log(tmp_path: Path) -> None:
    keeper = ManagedProcess(
        Launch("worker", ("/no/such/program",), tmp_path / "log"),
        lambda text: None,
        fatal_codes=frozenset({1}),
    )
    await keeper.run()

    assert keeper.phase == "failed"
    assert "No such file or directory" in keeper.last_error()


def test_kill_session_without_a_process_kills_nothing() -> None:
    assert kill_session(2**22 + 1) == 0
    assert os.getpid() in session_members(os.getsid(0))


def test_last_lines_of_a_missing_log_are_none(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none", 3) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "code 0"), (1, "code 1"), (-signal.SIGKILL, "signal SIGKILL"), (-99, "signal 99")],
)
def test_exit_is_described_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
