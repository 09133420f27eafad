"""Traces of journeys: where they go, what is in them, and what a collector that is away costs."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdcluster_worker.config.worker import Identity, load_worker_config
from pdcluster_worker.errors import ConfigError, RequestError
from pdcluster_worker.messages.peers import Fact
from pdcluster_worker.tracing import trace_context
from pdcluster_worker.tracing.otel import close_tracing, endpoint_in, start_tracing
from pdcluster_worker.tracing.request_trace import (
    ENDED,
    LIFETIME,
    RecentTraces,
    add_event,
    add_event_at,
)
from tests.otlp_collector import Collector
from tests.worker.config.engine_files import MINIMUM, write

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PARENT = f"00-{32 * 'a'}-{16 * 'b'}-01"


@pytest.fixture(params=["http/protobuf", "grpc"])
def collector(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Collector]:
    """Takes the traces by either protocol."""
    with Collector() as collector:
        for name, value in collector.environment(request.param).items():
            monkeypatch.setenv(name, value)
        yield collector
        assert {span.protocol for span in collector.spans} <= {request.param}


async def trace(
    folder: Path,
    parent: str = "",
    error: Exception | None = None,
    ended: Mapping[str, Fact] | None = None,
) -> dict[str, str]:
    """One journey, traced to its end; returns the context that its peers would be given."""
    traces = RecentTraces()
    tracing = start_tracing(
        traces, load_worker_config(write(folder, MINIMUM)), Identity("d0", "test", "127.0.0.1")
    )
    trace_context.enter(parent)
    try:
        with traces.of("r1", role="ingress") as trace:
            sent = trace_context.current()
            add_event("decode_worker", worker="d1", policy="least", cost=2.5)
            for number, name in enumerate(LIFETIME[1:]):
                add_event_at(name, trace.began_seconds + number)
            if ended is not None:
                add_event(ENDED, **ended)
            if error is not None:
                raise error
    except RequestError:
        pass
    await close_tracing(tracing)
    return sent


async def test_trace_has_the_lifetime_and_a_span_for_each_phase(
    collector: Collector, tmp_path: Path
) -> None:
    sent = await trace(tmp_path, PARENT)

    (request,) = (span for span in collector.spans if span.name == "request ingress")
    assert (request.trace_id, request.parent_id, request.worker) == (32 * "a", 16 * "b", "d0")
    assert sent == {"traceparent": f"00-{32 * 'a'}-{request.span_id}-01"}
    assert [name for name, _, _ in request.events if name in LIFETIME] == list(LIFETIME)
    assert {span.name for span in collector.spans if span.parent_id == request.span_id} == {
        "decision",
        "prefill",
        "transfer",
        "decode",
    }
    assert all(request.begin <= span.begin <= span.end <= request.end for span in collector.spans)
    (decision,) = (span for span in collector.spans if span.name == "decision")
    assert decision.attributes == {
        "pdcluster.worker": "d1",
        "pdcluster.policy": "least",
        "pdcluster.cost": 2.5,
    }


async def test_trace_of_an_answer_has_what_the_conventions_for_generative_ai_name(
    collector: Collector, tmp_path: Path
) -> None:
    ended: dict[str, Fact] = {
        "operation": "chat",
        "model": "tiny",
        "choices": 2,
        "response": "chatcmpl-1",
        "prompt_tokens": 30,
        "completion_tokens": 8,
        "cached_tokens": 16,
        "ttft_seconds": 0.25,
        "reason": "length,stop",
    }
    await trace(tmp_path, ended=ended)

    (request,) = (span for span in collector.spans if span.name == "request ingress")
    reasons = request.attributes.pop("gen_ai.response.finish_reasons")
    assert [each.string_value for each in reasons.values] == ["length", "stop"]
    found = {name: value for name, value in request.attributes.items() if "gen_ai" in name}
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdcluster",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 16,
    }


async def test_trace_of_a_failure_says_so(collector: Collector, tmp_path: Path) -> None:
    await trace(tmp_path, error=RequestError("no room", status=503, code="queue_full"))

    (request,) = (span for span in collector.spans if span.name == "request ingress")
    assert (request.is_error, request.parent_id) == (True, "")
    assert request.attributes["error.type"] == "queue_full"
    assert ("failed", {"pdcluster.reason": "queue_full", "pdcluster.message": "no room"}) in [
        (name, facts) for name, _, facts in request.events
    ]


async def test_trace_of_an_answer_that_broke_off_has_its_error_and_no_finish_reason(
    collector: Collector, tmp_path: Path
) -> None:
    ended: dict[str, Fact] = {"model": "tiny", "reason": "disconnected", "error": "disconnected"}
    await trace(tmp_path, ended=ended)

    (request,) = (span for span in collector.spans if span.name == "request ingress")
    assert request.is_error
    assert request.attributes["error.type"] == "disconnected"
    assert "gen_ai.response.finish_reasons" not in request.attributes


async def test_trace_that_its_client_does_not_sample_is_passed_on_and_not_made(
    collector: Collector, tmp_path: Path
) -> None:
    sent = await trace(tmp_path, PARENT[:-2] + "00")

    assert collector.spans == []
    assert sent["traceparent"].startswith(f"00-{32 * 'a'}-")


async def test_collector_that_is_away_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    async with asyncio.timeout(30):
        assert await trace(tmp_path)


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, None),
        ({ENDPOINT: ""}, None),
        ({ENDPOINT: "http://a"}, "http://a"),
        ({ENDPOINT: "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"}, "http://b"),
        ({ENDPOINT: "http://a", "OTEL_SDK_DISABLED": "true"}, None),
        ({ENDPOINT: "http://a", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_tracing_is_off_unless_the_environment_names_a_collector(
    environment: dict[str, str], endpoint: str | None
) -> None:
    assert endpoint_in(environment) == endpoint


def test_tracing_refuses_a_protocol_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://a")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")

    with pytest.raises(
        ConfigError,
        match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': set it to one of http/protobuf, grpc",
    ):
        start_tracing(
            RecentTraces(),
            load_worker_config(write(tmp_path, MINIMUM)),
            Identity("d0", "test", "127.0.0.1"),
        )
