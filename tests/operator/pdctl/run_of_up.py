"""A `pdctl up` with stand-in workers and a real etcd, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.operator.pdctl.stub_model import stub_model

BY_A_USER = ("env", "--default-signal=INT")
"""A run in the background ignores SIGINT, and what it starts inherits that."""

READY = "ready: http://127.0.0.1:"
_STANDIN = Path(__file__).parent / "local" / "standin_worker.py"
_UP = """
import functools, sys
from pdctl.cli import main, up
up.UpRequest = functools.partial(up.UpRequest, command=(sys.executable, {standin!r}))
main.main()
"""


@dataclass
class Run:
    """A pdctl that was started, and what it wrote."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    output: Path
    wait_until: Callable[..., Any]

    def text(self) -> str:
        return self.output.read_text()

    async def shows(self, text: str) -> None:
        await self.wait_until(lambda: text in self.text(), text)

    def state(self) -> dict[str, Any] | None:
        files = list(self.state_dir.glob("chat/run-*/state.json"))
        return json.loads(files[0].read_text()) if files else None

    def pids(self) -> list[int]:
        """etcd's and the workers'."""
        state = self.state() or {}
        return [state["etcd"]["pid"], *(worker["pid"] for worker in state["workers"])]

    def states(self) -> list[str]:
        return [worker["state"] for worker in (self.state() or {"workers": []})["workers"]]


@pytest.fixture
def start(
    tmp_path: Path,
    document: dict[str, Any],
    write_document: Callable[[dict[str, Any]], Path],
    wait_until: Callable[..., Any],
) -> Iterator[Callable[..., Run]]:
    """Start pdctl up on the document, or on a file, in a home folder of its own; whatever is left
    of it afterwards is killed.

    by: a program that runs it
    """
    stub_model(tmp_path / "model")
    document["spec"]["model"]["path"] = "model"
    started: list[Run] = []

    def begin(
        *options: str,
        standin: str = "serve",
        file: Path | None = None,
        by: tuple[str, ...] = (),
    ) -> Run:
        output = tmp_path / f"output-{len(started)}"
        with output.open("wb") as written:
            served = str(file or write_document(document))
            command = [
                *by,
                sys.executable,
                "-c",
                _UP.format(standin=str(_STANDIN)),
                "up",
                served,
                "--no-progress",
            ]
            process = subprocess.Popen(
                [*command, "--state-dir", str(tmp_path / "state"), *(options or ("--port", "0"))],
                stdout=written,
                stderr=subprocess.STDOUT,
                env={**os.environ, "STANDIN": standin, "HOME": str(tmp_path)},
            )
        started.append(Run(process, tmp_path / "state", output, wait_until))
        return started[-1]

    yield begin
    for run in started:
        run.process.kill()
        run.process.wait()


def none_alive(pids: list[int]) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    )
