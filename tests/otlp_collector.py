"""A collector of traces: takes OTLP over HTTP and over gRPC, as any of them does, and keeps the
spans.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

Protocol = Literal["http/protobuf", "grpc"]
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Span:
    """One span; ids are hexadecimal, times in nanoseconds, events (name, time, attributes) in their
    order.
    """

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
    protocol: Protocol


class Collector:
    """Use it as a context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                content = self.rfile.read(int(self.headers["content-length"]))
                collector._take(ExportTraceServiceRequest.FromString(content), "http/protobuf")
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        def export(
            request: ExportTraceServiceRequest, _: grpc.ServicerContext
        ) -> ExportTraceServiceResponse:
            collector._take(request, "grpc")
            return ExportTraceServiceResponse()

        handler = grpc.unary_unary_rpc_method_handler(
            export,
            ExportTraceServiceRequest.FromString,
            ExportTraceServiceResponse.SerializeToString,
        )
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._grpc = grpc.server(ThreadPoolExecutor(2))
        self._grpc.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler})]
        )
        self._ports = {
            "http/protobuf": self._server.server_port,
            "grpc": self._grpc.add_insecure_port("127.0.0.1:0"),
        }

    def environment(self, protocol: Protocol = "http/protobuf") -> dict[str, str]:
        """Environment that sends a worker's traces here, soon."""
        endpoint = f"http://127.0.0.1:{self._ports[protocol]}"
        # the default
        given = {} if protocol == "http/protobuf" else {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "no_proxy": "127.0.0.1",
            **given,
        }

    def __enter__(self) -> Self:
        self._grpc.start()
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._grpc.stop(grace=None).wait()

    def of_trace(self, trace_id: str) -> list[Span]:
        """Its spans so far, by their beginning."""
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.begin
        )

    def _take(self, request: ExportTraceServiceRequest, protocol: Protocol) -> None:
        for resource in request.resource_spans:
            worker = _values(resource.resource.attributes)["service.instance.id"]
            for scope in resource.scope_spans:
                self.spans.extend(_span(span, worker, protocol) for span in scope.spans)


def _span(span: Any, worker: str, protocol: Protocol) -> Span:
    events = tuple(
        (event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events
    )
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Span(
        span.name,
        *ids,
        *times,
        worker,
        _values(span.attributes),
        events,
        span.status.code == 2,
        protocol,
    )


def _values(attributes: Sequence[Any]) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
