"""One line for each log record, as text or as JSON: no text from outside makes one of its own."""

import json
import logging
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime

LOG_FORMAT = "PDCLUSTER_LOG_FORMAT"
"""Environment variable of the operator and of workers."""


class OneLineText(logging.Formatter):
    """Writes key=value of each field after the message, and control characters and line ends by
    their codes.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        words = (f" {key}={_short(value)}" for key, value in fields.items())
        return super().formatMessage(record) + "".join(words)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\\", "\\\\").translate(ESCAPED)


class JsonLines(logging.Formatter):
    """Writes time, level, logger, message, the fields that `log_fields` was given, the traceback as
    error, and a stack as stack.  Numbers that JSON has not are null.
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
        if record.stack_info:
            content["stack"] = self.formatStack(record.stack_info)
        return json.dumps({key: _finite(value) for key, value in content.items()})


def log_fields(logger: logging.Logger, message: str, fields: Mapping[str, object]) -> None:
    """Log key=value after the message as text, and each key as one of the object's as JSON."""
    logger.info(message, extra={_FIELDS: fields})


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else repr(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_FIELDS = "fields"
_PLAIN = re.compile(r"[\w.,:/-]+")
_ENDS = [*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029]
ESCAPED = {code: repr(chr(code))[1:-1] for code in _ENDS}
"""Control characters and line ends by their codes, for str.translate."""

FORMATTERS: Mapping[str, logging.Formatter] = {
    "text": OneLineText("%(asctime)s %(levelname)s %(name)s %(message)s"),
    "json": JsonLines(),
}
