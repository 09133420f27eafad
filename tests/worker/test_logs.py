"""Whatever is logged is one line on stderr."""

import json
import os
import subprocess
import sys

PROGRAM = """
import logging, warnings
from pdcluster_worker.system.process import start_logging
start_logging()
try:
    raise ValueError("two\\nlines")
except ValueError:
    logging.getLogger("worker").exception("failed reason=%r", "x")
warnings.warn("old\\nways")
"""


def run(log_format: str) -> subprocess.CompletedProcess[str]:
    """A process that logs an error and a warning."""
    environment = {**os.environ, "PDCLUSTER_LOG_FORMAT": log_format}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_traceback_and_a_warning_are_a_line_each() -> None:
    result = run("")
    failure, warning = result.stderr.splitlines()
    assert r"ERROR worker failed reason='x'\nTraceback (most recent call last):\n" in failure
    assert failure.endswith(r"ValueError: two\nlines")
    assert "WARNING py.warnings" in warning
    assert result.stdout == ""


def test_json_is_an_object_for_each_line() -> None:
    failure, warning = (json.loads(line) for line in run("json").stderr.splitlines())

    assert (failure["level"], failure["message"]) == ("error", "failed reason='x'")
    assert failure["error"].endswith("ValueError: two\nlines")
    assert warning["logger"] == "py.warnings"


def test_unknown_format_ends_the_process_with_its_name() -> None:
    result = run("xml")

    assert result.returncode == 2
    assert result.stderr == "error: PDCLUSTER_LOG_FORMAT is 'xml': set it to text or json\n"
