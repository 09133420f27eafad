"""The way of one request through the worker: what was decided, by which numbers, and when.

A part notes what it decides; it needs no reference to the request, for the
journey is that of the running task and of the tasks it starts.  Traces and the
answer to "why did it go there" read the journey (`recent`).  Names of notes
that readers know: the lifetime events below, `decode_worker` (which one, by
which rule and costs), `prefix` (the request whose KV was waited for), `offload`
(local or remote prefill, and why), `credit` (how long a prefill worker was
waited for), `refused`, `failed`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from pdcluster_worker.messages.peers import Fact, PeerEvent

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


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    """One thing that happened; seconds: of `time.monotonic`; worker: the pod, "" = this one.

    Thousands are kept, of which the garbage collector is to know nothing: facts hold no other
    object.
    """

    name: str
    seconds: float
    facts: dict[str, Fact]
    worker: str = ""


@dataclass(slots=True)
class RequestTrace:
    """Events of one request in the order they were noted: the first MAX_EVENTS, the last of which
    is the newest.

    began_seconds, began_unix: the same moment by `time.monotonic` and by `time.time`.
    """

    request_id: str
    events: list[TraceEvent] = field(default_factory=list)
    began_seconds: float = field(default_factory=time.monotonic)
    began_unix: float = field(default_factory=time.time)
    _num_taken: int = 0

    def add(self, event: TraceEvent) -> None:
        """Note an event."""
        del self.events[MAX_EVENTS - 1 :]
        self.events.append(event)

    def in_order(self) -> list[TraceEvent]:
        """Events by time; those of one moment as they were noted."""
        return sorted(self.events, key=lambda event: event.seconds)

    def last(self, *names: str) -> TraceEvent | None:
        """The last event of any of these names."""
        return next((event for event in reversed(self.events) if event.name in names), None)

    def take(self) -> tuple[PeerEvent, ...]:
        """Events noted here since the last call, for the worker that asked; seconds count from the
        beginning.
        """
        fresh = self.events[self._num_taken :]
        self._num_taken = len(self.events)
        return tuple(
            PeerEvent(_own_name(event.name), event.seconds - self.began_seconds, event.facts)
            for event in fresh
            if not event.worker
        )


def _own_name(name: str) -> str:
    """A request is issued once, where its client sent it."""
    return "received" if name == "issued" else name


@contextmanager
def begin_trace(request_id: str) -> Iterator[RequestTrace]:
    """Collect what the running task, and those it starts, note from here on."""
    trace = RequestTrace(request_id)
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def add_event(name: str, /, **facts: Fact) -> None:
    """Add an event to the journey of the running task; no-op outside of one."""
    if (trace := _current.get()) is not None:
        trace.add(TraceEvent(name, time.monotonic(), facts))


def add_event_at(name: str, seconds: float, /, **facts: Fact) -> None:
    """The same for what has happened at `seconds`; not before the journey began, nor before the
    last lifetime event.
    """
    if (trace := _current.get()) is not None:
        before = trace.last(*LIFETIME)
        earliest = trace.began_seconds if before is None else before.seconds
        trace.add(TraceEvent(name, max(seconds, earliest), facts))


def merge_events(notes: Iterable[PeerEvent]) -> None:
    """Add what a peer has noted of the request; its times are ours already."""
    if (trace := _current.get()) is not None:
        for each in notes:
            trace.add(TraceEvent(each.name, each.seconds, each.facts, each.worker))
