"""Whatever the operator logs is one line on stderr, as text or as JSON."""

import json
import logging
import subprocess
import sys

import pytest

from pdcluster_operator.settings import JsonLines, OneLineText

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
FORGED = "a\n2026-01-01 00:00:00,000 INFO pdcluster_operator.lease leading\r\\n\x1b[2K\x85\u2028é"


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


@pytest.mark.parametrize("formatter", [OneLineText("%(message)s"), JsonLines()], ids=type)
def test_text_of_a_tenant_cannot_forge_a_line(formatter: logging.Formatter):
    record = logging.LogRecord("operator", logging.INFO, "", 0, "key=%s", (FORGED,), None)
    (line,) = formatter.format(record).splitlines()
    assert "\x1b" not in line


def test_text_says_which_characters_it_had():
    record = logging.LogRecord("operator", logging.INFO, "", 0, "key=%s", (FORGED,), None)
    assert OneLineText("%(message)s").format(record) == (
        r"key=a\n2026-01-01 00:00:00,000 INFO pdcluster_operator.lease leading\r\\n"
        r"\x1b[2K\x85\u2028é"
    )


def test_json_says_what_was_logged():
    record = logging.LogRecord("operator", logging.INFO, "", 0, "key=%s", (FORGED,), None)
    assert json.loads(JsonLines().format(record))["message"] == f"key={FORGED}"
