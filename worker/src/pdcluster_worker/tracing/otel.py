"""OpenTelemetry spans of requests; off unless the usual environment variables name a collector.

A request costs its event loop the beginning of one span (an SDK span with all its events would
be 55 us more); the rest is made and sent in other threads, and left out where these fall behind.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Thread
from typing import Any

from pdcluster_worker.config.worker import Identity, WorkerConfig
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.peers import Fact, TraceEvent
from pdcluster_worker.tracing import trace_context
from pdcluster_worker.tracing.request_trace import ENDED, RecentTraces, RequestTrace

logger = logging.getLogger(__name__)

MAX_PENDING = 2048
"""Traces that wait to be made into spans; beyond them a trace is left out."""

CLOSE_SECONDS = 5.0

SERVICE_NAME = "pdcluster-worker"

_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
# of the semantic conventions for generative AI
_GEN_AI = {
    "operation": "gen_ai.operation.name",
    "model": "gen_ai.request.model",
    "choices": "gen_ai.request.choice.count",
    "response": "gen_ai.response.id",
    "ttft_seconds": "gen_ai.response.time_to_first_chunk",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
_BETWEEN = {
    "prefill": ("context_begin", "context_end"),
    "transfer": ("migration_begin", "migration_end"),
    "decode": ("decoding_begin", "decoding_end"),
}
_LASTING = {"credit": ("credit wait", "waited_seconds"), "first_step": ("first step", "seconds")}


def phases_of(trace: RequestTrace) -> Iterator[tuple[str, float, float, Mapping[str, Fact]]]:
    """(name, begin, end, facts) of phases on this worker, in the order in which they ended.

    >>> events = [TraceEvent("decode_worker", 10.5, {"rule": "p"}),
    ...     TraceEvent("credit", 12.0, {"waited_seconds": 1.0})]
    >>> trace = RequestTrace("r", events, 10.0)
    >>> [(name, begin, end) for name, begin, end, _ in phases_of(trace)]
    [('decision', 10.0, 10.5), ('credit wait', 11.0, 12.0)]
    """
    begun: dict[str, TraceEvent] = {}
    is_decided = False
    for event in trace.in_order():
        if event.worker:
            continue
        begun[event.name] = event
        if event.name == "decode_worker" and not is_decided:
            is_decided = True
            yield "decision", trace.began_seconds, event.seconds, event.facts
        if event.name in _LASTING:
            name, field = _LASTING[event.name]
            lasted = float(event.facts.get(field, 0.0))
            yield name, event.seconds - lasted, event.seconds, event.facts
        for name, (begin, end) in _BETWEEN.items():
            if event.name == end and begin in begun:
                first = begun[begin]
                yield name, first.seconds, event.seconds, {**first.facts, **event.facts}


def endpoint_in(environment: Mapping[str, str]) -> str | None:
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    )
    found = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    return None if is_off or not found else found


def start_tracing(
    traces: RecentTraces, config: WorkerConfig, identity: Identity
) -> "OtelExporter | None":
    """None without an endpoint in the environment.  Raises ConfigError for an unknown protocol."""
    endpoint = endpoint_in(os.environ)
    if endpoint is None:
        return None
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    if protocol not in _EXPORTERS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: set it to one of {', '.join(_EXPORTERS)}"
        )
    # loads what it needs only where it is asked for
    exporter = import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    resource = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME,
        "service.instance.id": identity.pod,
        "k8s.namespace.name": identity.namespace,
        "pdcluster.cluster": config.cluster,
        "pdcluster.role": config.role,
        "pdcluster.pool": config.pool,
        "pdcluster.revision": config.revision,
    }
    tracing = OtelExporter(exporter, resource)
    traces.on_begin, traces.on_end = tracing.begin, tracing.end
    logger.info("traces requests endpoint=%s protocol=%s", endpoint, protocol)
    return tracing


async def close_tracing(tracing: "OtelExporter | None") -> None:
    """Send what is left, within CLOSE_SECONDS."""
    if tracing is None:
        return
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def close() -> None:
        tracing.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(closed.set)

    # of a pool it would be waited for at the end of the process
    Thread(target=close, daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await closed.wait()


class OtelExporter:
    """exporter: of the OpenTelemetry SDK."""

    def __init__(self, exporter: Any, resource: Mapping[str, str]) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._trace, self._propagate = trace, propagate
        self._provider = TracerProvider(
            resource=Resource.create(dict(resource)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdcluster_worker")
        self._spans: dict[int, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._num_pending = 0
        self._num_left_out = 0

    def begin(self, trace: RequestTrace) -> None:
        """Begin a span in the trace of the running task, or in a new one, and enter its context."""
        parent = self._propagate.extract(trace_context.current())
        start = _nanoseconds(trace, trace.began_seconds)
        span = self._tracer.start_span(
            "request", context=parent, kind=self._trace.SpanKind.SERVER, start_time=start
        )
        self._spans[id(trace)] = span
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, self._trace.set_span_in_context(span))
        trace_context.receive(carrier.items())

    def end(self, trace: RequestTrace) -> None:
        span = self._spans.pop(id(trace), None)
        if span is None or not span.is_recording():
            return
        if self._num_pending >= MAX_PENDING:
            self._num_left_out += 1
            if self._num_left_out == 1:
                logger.warning("traces are left out: they cannot be made as fast as requests end")
            return
        self._num_pending += 1
        self._thread.submit(self._complete, span, trace, _now_of(trace))

    def close(self) -> None:
        """Send what is left, as long as the exporter's time limit allows; blocks."""
        self._thread.shutdown()
        self._provider.shutdown()

    def _complete(self, span: Any, trace: RequestTrace, end_seconds: float) -> None:
        try:
            self._describe(span, trace)
            context = self._trace.set_span_in_context(span)
            for name, begin, end, facts in phases_of(trace):
                start = _nanoseconds(trace, begin)
                below = self._tracer.start_span(
                    name, context=context, start_time=start, attributes=_attributes(facts)
                )
                below.end(end_time=_nanoseconds(trace, end))
            span.end(end_time=_nanoseconds(trace, end_seconds))
        except Exception:  # a fault here must cost a trace and nothing else
            logger.exception("a trace could not be made request=%s", trace.request_id)
        finally:
            self._num_pending -= 1

    def _describe(self, span: Any, trace: RequestTrace) -> None:
        issued = trace.events[0]
        span.update_name(f"request {issued.facts.get('role', '')}".strip())
        span.set_attributes({"pdcluster.request_id": trace.request_id, **_attributes(issued.facts)})
        for event in trace.in_order():
            if not event.worker:  # what another worker did is in its own span
                span.add_event(
                    event.name,
                    _attributes(event.facts),
                    timestamp=_nanoseconds(trace, event.seconds),
                )
        ended, failure = trace.last(ENDED), trace.last("failed")
        found = {} if ended is None else _gen_ai(ended.facts)
        if failure is not None:
            found.setdefault("error.type", failure.facts["reason"])
        span.set_attributes(found)
        if "error.type" in found:
            message = "" if failure is None else str(failure.facts.get("message", ""))
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))


def _attributes(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {f"pdcluster.{name}": value for name, value in facts.items()}


def _gen_ai(ended: Mapping[str, Fact]) -> dict[str, Any]:
    """Attributes of the event ENDED, whose reason is an error's code where it failed."""
    end = (
        {"error.type": ended["error"]}
        if "error" in ended
        else {"gen_ai.response.finish_reasons": str(ended["reason"]).split(",")}
    )
    return {
        **end,
        "gen_ai.provider.name": "pdcluster",
        "gen_ai.response.model": ended["model"],
        **{name: ended[fact] for fact, name in _GEN_AI.items() if fact in ended},
    }


def _now_of(trace: RequestTrace) -> float:
    return max([time.monotonic(), *(event.seconds for event in trace.events)])


def _nanoseconds(trace: RequestTrace, seconds: float) -> int:
    """Wall clock of a moment of the monotonic clock."""
    return round((trace.began_unix + seconds - trace.began_seconds) * 1e9)
