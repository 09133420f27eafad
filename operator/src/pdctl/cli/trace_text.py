"""The trace of a request as text: its events, the workers that decided them, and the figures."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pdctl.cli.table import table

COLUMNS = ("MS", "WHAT", "WORKER", "BY")

TraceBody = Mapping[str, Any]


def trace_lines(worker: str, trace: TraceBody) -> Iterator[str]:
    """A header line, and a table of events.

    >>> event = {"name": "decode", "seconds": 0.0015, "worker": "", "facts": {"worker": "d1",
    ...     "cost": 2.0}}
    >>> trace = {"request_id": "r", "began_unix": 0.0, "events": [event]}
    >>> print(*trace_lines("d0", trace), sep="\\n")
    request r at d0, 1970-01-01 00:00:00 UTC
     MS  WHAT    WORKER  BY
    1.5  decode  d0      worker d1, cost 2
    """
    began = datetime.fromtimestamp(float(trace.get("began_unix", 0.0)), UTC)
    yield f"request {trace.get('request_id')} at {worker}, {began:%Y-%m-%d %H:%M:%S} UTC"
    rows = [
        (
            f"{1000.0 * float(event.get('seconds', 0.0)):.1f}",
            str(event.get("name")),
            str(event.get("worker") or worker),
            _facts(event.get("facts")),
        )
        for event in trace.get("events", ())
    ]
    yield from table(COLUMNS, rows, right=(0,))


def _facts(facts: Any) -> str:
    if not isinstance(facts, Mapping):
        return ""
    return ", ".join(f"{name} {_value(value)}" for name, value in facts.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
