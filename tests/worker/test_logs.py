"""Whatever is logged is one line on stderr."""

import logging
import subprocess
import sys

from pdcluster_worker.system.process import OneLineFormatter

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


def test_a_traceback_and_a_warning_are_a_line_each() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    failure, warning = result.stderr.splitlines()
    assert r"ERROR worker failed reason='x'\nTraceback (most recent call last):\n" in failure
    assert failure.endswith(r"ValueError: two\nlines")
    assert "WARNING py.warnings" in warning
    assert result.stdout == ""


def test_what_came_from_outside_cannot_forge_a_line() -> None:
    record = logging.LogRecord(
        "worker", logging.INFO, "", 0, "label=%s", ("a\n2026-01-01 ERROR\r\\n",), None
    )
    assert OneLineFormatter("%(message)s").format(record) == r"label=a\n2026-01-01 ERROR\r\\n"
