"""Logs on stderr, one line per record, whatever text of a tenant is in it: no name, key or message
of an object can make a line of its own.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class OneLineText(logging.Formatter):
    r"""Writes the lines of a traceback, or of text that came from outside, in one: \n stands where
    a line ended, and other control characters are written by their codes.
    """

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\\", "\\\\").translate(_ESCAPED)


class JsonLines(logging.Formatter):
    """Writes a JSON object: time, level, logger, message, and error, the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            content["error"] = self.formatException(record.exc_info)
        return json.dumps(content)


_ENDS = [*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029]
_ESCAPED = {code: repr(chr(code))[1:-1] for code in _ENDS}
_FORMATTERS: Mapping[LogFormat, logging.Formatter] = {
    "text": OneLineText("%(asctime)s %(levelname)s %(name)s %(message)s"),
    "json": JsonLines(),
}
FORMATS: Mapping[str, LogFormat] = {"text": "text", "json": "json"}


def start_logging(level: int, log_format: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_FORMATTERS[log_format])
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    for name in ("kopf", "aiohttp"):
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
