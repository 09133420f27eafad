"""Nothing of a kept command outlives its keeper's end."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.system.waiting import wait_for

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
FAMILY = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('started', flush=True); time.sleep(600)"
)


EARLY = """
import os, signal, subprocess, sys
from pdcluster_worker.stock_engine.command import main
start = subprocess.Popen
def killed(*args, **kwargs):
    child = start(*args, **kwargs)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    return child
subprocess.Popen = killed
sys.exit(main([sys.executable, "-c", "import time; time.sleep(600)"]))
"""


def kept(program: str) -> "subprocess.Popen[bytes]":
    keeper = [sys.executable, "-m", "pdcluster_worker.stock_engine.command"]
    return subprocess.Popen([*keeper, sys.executable, "-c", program], stdout=subprocess.PIPE)


@pytest.fixture
def family() -> "Iterator[subprocess.Popen[bytes]]":
    process = kept(FAMILY)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    yield process
    process.kill()
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_command_and_its_children(
    family: "subprocess.Popen[bytes]", number: signal.Signals
) -> None:
    kin = psutil.Process(family.pid).children(recursive=True)
    assert len(kin) == 2

    family.send_signal(number)

    assert family.wait(30) == 128 + (number if number == signal.SIGTERM else signal.SIGKILL)
    wait_for(lambda: not any(one.is_running() for one in kin), 30, "all have ended")


def test_the_status_is_the_commands() -> None:
    process = kept("raise SystemExit(7)")
    process.communicate()

    assert process.returncode == 7


def test_a_signal_while_the_command_starts_ends_it_too() -> None:
    ended = subprocess.run([sys.executable, "-c", EARLY], stdout=subprocess.PIPE, check=False)

    assert ended.returncode == 128 + signal.SIGKILL
    assert not psutil.pid_exists(int(ended.stdout))
