"""Progress of long work: lines in a pipe, a bar on a terminal; both on stderr alone."""

import os
import pty
import subprocess
import sys

import pytest

from pdctl.cli.progress import LINE_SECONDS, Progress, shown_progress

WORK = """
from pdctl.cli.progress import shown_progress
with shown_progress() as shown:
    shown.begin("the cluster starts")
    shown.begin("answers", 3)
    for _ in range(3):
        shown.step()
print("result")
"""


def test_pipe_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.begin("answers", 10)
    for _ in range(10):
        now[0] += LINE_SECONDS / 2
        progress.step()

    seen = capsys.readouterr()
    assert seen.err.splitlines()[:2] == [
        "answers: 2 of 10 in 15 s, about 60 s left",
        "answers: 4 of 10 in 30 s, about 45 s left",
    ]
    assert (len(seen.err.splitlines()), seen.out) == (4, "")  # the last is the result's


def test_line_before_the_first_step_says_no_time_that_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    progress = Progress(lambda: now[0])
    progress.begin("requests", 10)
    now[0] += LINE_SECONDS
    progress.step(0)
    assert capsys.readouterr().err == f"requests: 0 of 10 in {LINE_SECONDS:.0f} s\n"


def test_stage_of_unknown_length_and_short_work_print_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown_progress() as shown:
        shown.step()
        shown.begin("answers", 2)
        shown.step()
        shown.step()

    assert capsys.readouterr() == ("", "")


def test_terminal_gets_a_bar_with_the_time_left() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65_536):
                shown += data
        except OSError:  # the other end is closed
            pass
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(ours)

    assert (process.returncode, out) == (0, b"result\n")
    for text in (b"answers", b"3 of 3", b"left:"):
        assert text in shown
    assert b"of ?" not in shown.partition(b"the cluster starts")[0]  # nothing without a name
