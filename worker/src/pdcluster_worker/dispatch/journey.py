"""The way of one request through the worker: what was decided, by which numbers, and when.

A part notes what it decides; it needs no reference to the request, for the
journey is that of the running task and of the tasks it starts.  Traces and the
answer to "why did it go there" read the journey.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Fact = str | int | float | bool

_current: ContextVar["Journey | None"] = ContextVar("journey", default=None)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; seconds: of `time.monotonic`."""

    name: str
    seconds: float
    facts: dict[str, Fact]


@dataclass(slots=True)
class Journey:
    """Events of one request in the order they happened."""

    request_id: str
    events: list[Event] = field(default_factory=list)


@contextmanager
def begun(request_id: str) -> Iterator[Journey]:
    """Collect what the running task, and those it starts, note from here on."""
    journey = Journey(request_id)
    token = _current.set(journey)
    try:
        yield journey
    finally:
        _current.reset(token)


def note(name: str, **facts: Fact) -> None:
    """Add an event to the journey of the running task; no-op outside of one."""
    if (journey := _current.get()) is not None:
        journey.events.append(Event(name, time.monotonic(), facts))
