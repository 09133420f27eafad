"""Whatever the operator logs is one line on stderr, as text or as JSON."""

import json
import subprocess
import sys

PROGRAM = """
import logging, warnings
from pdcluster_operator.settings import start_logging
start_logging(logging.INFO, "{}")
try:
    raise ValueError("two\\nlines")
except ValueError:
    logging.getLogger("pdcluster_operator").exception("failed key=%s", "default/chat")
warnings.warn("old\\nways")
logging.getLogger("kopf").info("said too much")
"""


def lines(log_format: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(log_format)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == ""
    return result.stderr.splitlines()


def test_a_traceback_and_a_warning_have_a_line_each():
    failure, warning = lines("text")
    assert "ERROR pdcluster_operator failed key=default/chat" in failure
    assert failure.endswith(r"ValueError: two\nlines")
    assert "WARNING py.warnings" in warning


def test_a_traceback_and_a_warning_have_a_json_object_each():
    failure, warning = (json.loads(line) for line in lines("json"))
    assert (failure["level"], failure["message"]) == ("error", "failed key=default/chat")
    assert failure["error"].endswith("ValueError: two\nlines")
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert set(warning) == {"time", "level", "logger", "message"}
