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

from pdcluster_worker.messages.peers import Fact, Note

LIFETIME = (
    *("issued", "context_begin", "context_end", "migration_begin", "migration_end"),
    *("decoding_begin", "decoding_end"),
)
"""Events of every request in their order; a local prefill has no migration."""

MAX_EVENTS = 128
"""Most events of one journey: a choice has some ten or twenty, and a client may ask for a thousand
choices.
"""

_current: ContextVar["Journey | None"] = ContextVar("journey", default=None)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One thing that happened; seconds: of `time.monotonic`; worker: the pod, "" = this one.

    Thousands are kept, of which the garbage collector is to know nothing: facts hold no other
    object.
    """

    name: str
    seconds: float
    facts: dict[str, Fact]
    worker: str = ""


@dataclass(slots=True)
class Journey:
    """Events of one request in the order they were noted: the first MAX_EVENTS, the last of which
    is the newest.

    began_seconds, began_unix: the same moment by `time.monotonic` and by `time.time`.
    """

    request_id: str
    events: list[Event] = field(default_factory=list)
    began_seconds: float = field(default_factory=time.monotonic)
    began_unix: float = field(default_factory=time.time)
    _num_taken: int = 0

    def add(self, event: Event) -> None:
        """Note an event."""
        del self.events[MAX_EVENTS - 1 :]
        self.events.append(event)

    def in_order(self) -> list[Event]:
        """Events by time; those of one moment as they were noted."""
        return sorted(self.events, key=lambda event: event.seconds)

    def last(self, *names: str) -> Event | None:
        """The last event of any of these names."""
        return next((event for event in reversed(self.events) if event.name in names), None)

    def take(self) -> tuple[Note, ...]:
        """Events noted here since the last call, for the worker that asked; seconds count from the
        beginning.
        """
        fresh = self.events[self._num_taken :]
        self._num_taken = len(self.events)
        return tuple(
            Note(_own_name(event.name), event.seconds - self.began_seconds, event.facts)
            for event in fresh
            if not event.worker
        )


def _own_name(name: str) -> str:
    """A request is issued once, where its client sent it."""
    return "received" if name == "issued" else name


@contextmanager
def begun(request_id: str) -> Iterator[Journey]:
    """Collect what the running task, and those it starts, note from here on."""
    journey = Journey(request_id)
    token = _current.set(journey)
    try:
        yield journey
    finally:
        _current.reset(token)


def note(name: str, /, **facts: Fact) -> None:
    """Add an event to the journey of the running task; no-op outside of one."""
    if (journey := _current.get()) is not None:
        journey.add(Event(name, time.monotonic(), facts))


def note_at(name: str, seconds: float, /, **facts: Fact) -> None:
    """The same for what has happened at `seconds`; not before the journey began, nor before the
    last lifetime event.
    """
    if (journey := _current.get()) is not None:
        before = journey.last(*LIFETIME)
        earliest = journey.began_seconds if before is None else before.seconds
        journey.add(Event(name, max(seconds, earliest), facts))


def adopt(notes: Iterable[Note]) -> None:
    """Add what a peer has noted of the request; its times are ours already."""
    if (journey := _current.get()) is not None:
        for each in notes:
            journey.add(Event(each.name, each.seconds, each.facts, each.worker))
