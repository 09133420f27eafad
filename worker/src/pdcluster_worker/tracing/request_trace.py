"""Trace of one request through the worker, held by its task: what was decided, why and when.

Names of events that readers know: LIFETIME, `decode_worker`, `prefix` (the request whose KV was
waited for), `offload`, `credit`, `refused`, `failed`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from pdcluster_worker.messages.peers import Fact, TraceEvent

LIFETIME = (
    *("issued", "context_begin", "context_end", "migration_begin", "migration_end"),
    *("decoding_begin", "decoding_end"),
)
"""Events of every request in their order; a local prefill has no migration."""

MAX_EVENTS = 128
"""Most events of one journey: a choice has some ten or twenty, and a client may ask for a thousand
choices.
"""

_current: ContextVar["RequestTrace | None"] = ContextVar("journey", default=None)


@dataclass(slots=True)
class RequestTrace:
    """The first MAX_EVENTS events of one request, the last of which is the newest.

    began_seconds, began_unix: the same moment by `time.monotonic` and by `time.time`.
    """

    request_id: str
    events: list[TraceEvent] = field(default_factory=list)
    began_seconds: float = field(default_factory=time.monotonic)
    began_unix: float = field(default_factory=time.time)
    _num_taken: int = 0

    def add(self, event: TraceEvent) -> None:
        del self.events[MAX_EVENTS - 1 :]
        self.events.append(event)

    def in_order(self) -> list[TraceEvent]:
        """Events by time; those of one moment as they were added."""
        return sorted(self.events, key=lambda event: event.seconds)

    def last(self, *names: str) -> TraceEvent | None:
        """The last event of any of these names."""
        return next((event for event in reversed(self.events) if event.name in names), None)

    def take(self) -> tuple[TraceEvent, ...]:
        """Events added here since the last call; seconds count from the beginning."""
        fresh = self.events[self._num_taken :]
        self._num_taken = len(self.events)
        return tuple(
            TraceEvent(_own_name(event.name), event.seconds - self.began_seconds, event.facts)
            for event in fresh
            if not event.worker
        )


def _own_name(name: str) -> str:
    """A request is issued once, where its client sent it."""
    return "received" if name == "issued" else name


@contextmanager
def begin_trace(request_id: str) -> Iterator[RequestTrace]:
    """Collect events of the running task, and of those it starts."""
    trace = RequestTrace(request_id)
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def add_event(name: str, /, **facts: Fact) -> None:
    """A no-op outside of a request."""
    if (trace := _current.get()) is not None:
        trace.add(TraceEvent(name, time.monotonic(), facts))


def add_event_at(name: str, seconds: float, /, **facts: Fact) -> None:
    """Add what happened at `seconds`; not before the trace or the last lifetime event."""
    if (trace := _current.get()) is not None:
        before = trace.last(*LIFETIME)
        earliest = trace.began_seconds if before is None else before.seconds
        trace.add(TraceEvent(name, max(seconds, earliest), facts))


def merge_events(events: Iterable[TraceEvent]) -> None:
    """Add events of a peer, whose seconds are of our clock."""
    if (trace := _current.get()) is not None:
        for event in events:
            trace.add(event)
