"""A collector of traces: takes OTLP as protobuf over HTTP, as any of them does, and keeps the spans."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Span:
    """One span; ids are hexadecimal, times in nanoseconds, events (name, time, attributes) in their order."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    worker: str
    attributes: dict[str, Any]
    events: tuple[tuple[str, int, dict[str, Any]], ...]
    is_error: bool


class Collector:
    """Use it as a context manager.  environment: what sends a worker's traces here, soon"""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.path, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50", "no_proxy": "127.0.0.1"}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of_trace(self, trace_id: str) -> list[Span]:
        """Its spans so far, by their beginning."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.begin)

    def _take(self, path: str, content: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            worker = _values(resource.resource.attributes)["service.instance.id"]
            for scope in resource.scope_spans:
                self.spans.extend(_span(span, worker) for span in scope.spans)


def _span(span: Any, worker: str) -> Span:
    events = tuple((event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events)
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Span(span.name, *ids, *times, worker, _values(span.attributes), events, span.status.code == 2)


def _values(attributes: Sequence[Any]) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
