"""One line for each log record, as text or as JSON: no text from outside makes one of its own."""

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime

LOG_FORMAT = "PDCLUSTER_LOG_FORMAT"
"""Environment variable of the operator and of workers."""


class OneLineText(logging.Formatter):
    """Writes control characters and line ends by their codes."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\\", "\\\\").translate(_ESCAPED)


class JsonLines(logging.Formatter):
    """Writes time, level, logger, message, the fields that `fields` has given, and the traceback as
    error.
    """

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            content["error"] = self.formatException(record.exc_info)
        return json.dumps(content)


def log_fields(logger: logging.Logger, message: str, fields: Mapping[str, object]) -> None:
    """Log key=value after the message; in JSON each key is one of the object's, too."""
    text = " ".join(f"{key}={_short(value)}" for key, value in fields.items())
    logger.info("%s %s", message, text, extra={_FIELDS: fields})


def _short(value: object) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else repr(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_FIELDS = "fields"
_PLAIN = re.compile(r"[\w.,:/-]+")
_ENDS = [*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029]
_ESCAPED = {code: repr(chr(code))[1:-1] for code in _ENDS}

FORMATTERS: Mapping[str, logging.Formatter] = {
    "text": OneLineText("%(asctime)s %(levelname)s %(name)s %(message)s"),
    "json": JsonLines(),
}
