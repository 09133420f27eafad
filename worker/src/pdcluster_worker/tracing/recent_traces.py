"""Traces of the last requests of this worker, for `pdctl why --request`.

Bounded: the oldest of the request that was longest idle goes first.  Nothing of a prompt or an
answer is in them but numbers of tokens.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import TraceEvent
from pdcluster_worker.tracing.request_trace import (
    LIFETIME,
    RequestTrace,
    add_event,
    begin_trace,
)

KEPT = 2048
"""Journeys: some minutes of a busy ingress, in about 4 MiB; 128 MiB where clients ask for many
choices.
"""

MAX_ROUTE_CHARACTERS = 2000
"""Longest response header: proxies take 4 KiB of one at least."""

UNKEPT_STATUSES = frozenset({401, 404, 405})
"""Statuses of answers to requests that no route took: any client can send them, and would push out
other journeys.
"""

_HEX = re.compile("[0-9a-f]{32}")
_UNSAFE = re.compile(r"[^\x21-\x7e]+")


class RecentTraces:
    """on_begin, on_end: called with each trace, in its own task; must not block."""

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
            self._forget()

    def _forget(self) -> None:
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
    decisions = [
        _words(event)
        for event in trace.in_order()
        if event.name not in LIFETIME and event.name != "answered"
    ]
    end = trace.last("context_end")
    place = (
        []
        if end is None or "prefill" not in end.facts
        else [f"prefill={_safe(end.facts['prefill'])}"]
    )
    return shortened("; ".join([*decisions, *place]), MAX_ROUTE_CHARACTERS)


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
