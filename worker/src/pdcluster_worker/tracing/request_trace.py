"""Traces of requests, each held by its task; the last ones are kept for `pdctl why --request`.

Names of events that readers know: LIFETIME, `decode_worker`, `prefix` (the request whose KV was
waited for), `offload`, `credit`, `refused`, `failed`.  They hold numbers of tokens, and no text.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import Fact, Generated, PrefillPlace, TraceEvent
from pdcluster_worker.messages.requests import Token

LIFETIME = (
    *("issued", "context_begin", "context_end", "migration_begin", "migration_end"),
    *("decoding_begin", "decoding_end"),
)
"""Events of every request in their order; a local prefill has no migration."""

ENDED = "ended"
"""Event of the worker that answers the client, with the figures of the whole request."""

MAX_EVENTS = 128
"""Most of one request: a choice has ten or twenty, and a client may ask for a thousand choices."""

KEPT = 2048
"""Traces: some minutes of a busy ingress, in about 4 MiB; 128 MiB where clients ask for many
choices.
"""

MAX_ROUTE_CHARACTERS = 2000
"""Longest response header of ours: proxies take 4 KiB of one at least."""

UNKEPT_STATUSES = frozenset({401, 404, 405})
"""Statuses of answers to requests that no route took: any client can send them, and would push out
other traces.
"""

_HEX = re.compile("[0-9a-f]{32}")
_UNSAFE = re.compile(r"[^\x21-\x7e]+")

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
        return next((event for event in reversed(self.events) if event.name in names), None)

    def take(self) -> tuple[TraceEvent, ...]:
        """Events added here since the last call; seconds count from the beginning.

        A request is issued once, where its client sent it: a peer has received it.
        """
        fresh = self.events[self._num_taken :]
        self._num_taken = len(self.events)
        return tuple(
            TraceEvent(
                "received" if event.name == "issued" else event.name,
                event.seconds - self.began_seconds,
                event.facts,
            )
            for event in fresh
            if not event.worker
        )


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


def places(prefill: PrefillPlace | None) -> dict[str, Fact]:
    """Workers that decoded and prefilled the running request, as far as its trace says.

    prefill: of the first choice, as the header has it.  Its worker is left out where choices had
    different ones.
    """
    found: dict[str, Fact] = {} if prefill is None else {"prefill": prefill}
    if (trace := _current.get()) is None:
        return found
    peers = {event.facts["peer"] for event in trace.events if event.name == "credit"}
    if (decoding := trace.last("decode_worker")) is not None:
        found["decode_worker"] = decoding.facts["worker"]
    if prefill == "remote" and len(peers) == 1 and (peer := peers.pop()):
        found["prefill_worker"] = peer
    return found


def merge_events(events: Iterable[TraceEvent]) -> None:
    """Add events of a peer, whose seconds are of our clock."""
    if (trace := _current.get()) is not None:
        for event in events:
            trace.add(event)


# --- events of a lifetime -----------------------------------------------------------------------


def trace_first_token(generated: Generated) -> None:
    """A prefill here goes on to decode at once."""
    trace_prefill(generated.token, generated.prefill or "local")
    if generated.prefill != "remote":
        trace_decoding("begin")


def trace_prefill(token: Token, place: str) -> None:
    now, seconds = time.monotonic(), token.prefill_seconds or 0.0
    if (read := token.tier_read) is not None:
        add_event_at("kv_tier", now - seconds, **msgspec.structs.asdict(read))
    add_event_at("context_begin", now - seconds, queue_seconds=token.queue_seconds or 0.0)
    add_event_at("context_end", now, prefill=place, cached_tokens=token.cached_tokens)


def trace_migration(done: PrefillDone) -> None:
    """The KV has moved.  Writes begin while the prompt is computed: `seconds` has all of them."""
    now = time.monotonic()
    add_event_at("migration_begin", now - done.seconds)
    add_event_at("migration_end", now, seconds=done.seconds, bytes=done.num_bytes)


def trace_decoding(end: str, **facts: Fact) -> None:
    add_event_at(f"decoding_{end}", time.monotonic(), **facts)


# --- traces of the last requests ----------------------------------------------------------------


class RecentTraces:
    """Bounded: the oldest trace of the request that was longest idle goes first.

    on_begin, on_end: called with each trace, in its own task; must not block.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.on_begin: Callable[[RequestTrace], None] = lambda _: None
        self.on_end: Callable[[RequestTrace], None] = lambda _: None
        self._kept = kept
        self._ended: OrderedDict[str, list[RequestTrace]] = OrderedDict()
        self._num_ended = 0

    @contextmanager
    def of(self, request_id: str, **facts: str | float) -> Iterator[RequestTrace]:
        """Trace a request from now on, and keep it at its end.  facts: of its event `issued`."""
        with begin_trace(request_id) as trace:
            self.on_begin(trace)
            add_event("issued", **facts)
            try:
                yield trace
            except Exception as e:
                failure = (
                    e.code or str(e.status) if isinstance(e, RequestError) else type(e).__name__
                )
                add_event("failed", reason=failure, message=shortened(str(e), 200))
                raise
            finally:
                self._keep(trace)
                self.on_end(trace)

    def find(self, request_id: str) -> list[RequestTrace]:
        """By x-request-id, the completion's id, or the id of one choice."""
        return self._ended.get(_key(request_id), [])

    def _keep(self, trace: RequestTrace) -> None:
        answered = trace.last("answered")
        if answered is not None and answered.facts["status"] in UNKEPT_STATUSES:
            return
        key = _key(trace.request_id)
        self._ended.setdefault(key, []).append(trace)
        self._ended.move_to_end(key)
        self._num_ended += 1
        if self._num_ended > self._kept:
            self._num_ended -= 1
            oldest, traces = next(iter(self._ended.items()))
            del traces[0]
            if not traces:
                del self._ended[oldest]


def _key(request_id: str) -> str:
    """Common part of all ids of one client's request.

    >>> _key("cmpl-" + 32 * "a" + "-0") == _key(32 * "a"), _key("r1")
    (True, 'r1')
    """
    found = _HEX.search(request_id)
    return found[0] if found else request_id


def route_of(trace: RequestTrace) -> str:
    """The response header x-pdcluster-route.

    >>> trace = RequestTrace("r", [TraceEvent("decode", 1.0, {"worker": "d 1", "cost": 2.5})])
    >>> trace.events.append(TraceEvent("context_end", 2.0, {"prefill": "local"}, worker="d1"))
    >>> route_of(trace)
    'decode worker=d_1 cost=2.5; prefill=local'
    """
    words = [
        _words(event)
        for event in trace.in_order()
        if event.name not in LIFETIME and event.name != "answered"
    ]
    end = trace.last("context_end")
    if end is not None and "prefill" in end.facts:
        words.append(f"prefill={_safe(end.facts['prefill'])}")
    return shortened("; ".join(words), MAX_ROUTE_CHARACTERS)


def _words(event: TraceEvent) -> str:
    facts = {"at": event.worker, **event.facts} if event.worker else event.facts
    return " ".join(
        [_safe(event.name), *(f"{_safe(name)}={_safe(value)}" for name, value in facts.items())]
    )


def _safe(value: object) -> str:
    return _UNSAFE.sub("_", f"{value:.4g}" if isinstance(value, float) else str(value))


def as_json(trace: RequestTrace) -> dict[str, Any]:
    """seconds: since the beginning."""
    events = [
        {
            "name": event.name,
            "seconds": round(event.seconds - trace.began_seconds, 6),
            "worker": event.worker,
            "facts": event.facts,
        }
        for event in trace.in_order()
    ]
    return {"request_id": trace.request_id, "began_unix": trace.began_unix, "events": events}
