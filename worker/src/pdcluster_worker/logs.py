"""Logs of every process of a worker: on stderr, one line per record."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class OneLineFormatter(logging.Formatter):
    """Escapes line ends, of tracebacks and of text from outside."""

    def format(self, record: logging.LogRecord) -> str:
        return (
            super().format(record).replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
        )


def start_logging() -> None:
    """Once per process, before anything logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
    # The format uses none of these, nor the source line; collecting them costs a third of a log
    # line's time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
