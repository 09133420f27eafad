"""`pdctl`: in the process of the tests, or as a user starts it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from pdctl.cli.main import app
from tests.system.waiting import wait_for

START_SECONDS = 120.0


def pdctl(*arguments: str, stdin: str = "") -> Result:
    """Run a command; its output and exit code are in the result."""
    return CliRunner().invoke(app, arguments, input=stdin)


@contextmanager
def up(
    *arguments: str, output: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[str]:
    """`pdctl up` on a free port, and the address of its API; one Ctrl-C ends it with 0."""
    with output.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdctl", "up", *arguments, "--port", "0", "--no-progress"],
            stdout=written,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
        )
    try:
        wait_for(
            lambda: "ready: " in output.read_text() or process.poll() is not None,
            START_SECONDS,
            output.read_text,
        )
        found = re.search(r"^ready: (http://\S+)/v1$", output.read_text(), re.MULTILINE)
        assert found, output.read_text()
        yield found[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(START_SECONDS) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
