"""The bench of routing: its load generator on its own fake workers, and its tables."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from random import Random

import pytest
import router_fakes
import router_load
from router_fakes import NUM_TOKENS, HttpWorker, addresses_of, serve_http
from router_load import Answer, Connections, LoadError, Measured, arrivals, closed_loop, open_loop
from routing_overhead import DIRECT, Figures, Load, loads, report

WHOLE = Load("whole", stream=False, concurrency=4)
STREAMED = Load("streamed", stream=True, rate=100.0)


def test_arrivals_have_the_rate_and_are_drawn_again_the_same() -> None:
    times = list(arrivals(500.0, 10.0, Random(1)))

    assert times == list(arrivals(500.0, 10.0, Random(1)))
    assert 4800 < len(times) < 5200
    assert all(0 < a < b < 10 for a, b in pairwise(times))


@pytest.fixture
async def workers() -> AsyncIterator[list[str]]:
    """Addresses of fake workers in this loop, whose connections have ended at its end."""
    servers = await serve_http(3)
    yield addresses_of(servers)
    for server in servers:
        server.close()
    async with asyncio.timeout(20):
        while HttpWorker.num_open:
            await asyncio.sleep(0.001)


async def test_closed_loop_gets_whole_answers(workers: list[str]) -> None:
    connections = Connections(workers)
    await connections.open(1)
    measured = await closed_loop(connections, WHOLE.request(), concurrency=4, seconds=0.01)
    await connections.close()

    assert len(measured.answers) >= 4
    assert all(0 < answer.first_seconds <= answer.last_seconds for answer in measured.answers)


async def test_open_loop_sees_a_stream_from_its_first_token_to_its_last(workers: list[str]) -> None:
    connections = Connections(workers)
    measured = await open_loop(connections, STREAMED.request(), [0.0, 0.001])
    await connections.close()

    assert len(measured.answers) == len(measured.late_seconds) == 2
    assert all(0 < answer.first_seconds < answer.last_seconds for answer in measured.answers)


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        (
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy",
            "status 503: b'busy'",
        ),
        (b"", "the connection was closed"),
    ],
)
async def test_an_answer_that_is_no_success_fails_the_load(sent: bytes, failure: str) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connections = Connections(addresses_of([server]))
        with pytest.raises(LoadError, match=failure):
            await connections.ask(WHOLE.request())
        await connections.close()
        await asyncio.wait_for(ended.wait(), 20)


def figures(milliseconds: float, **cpu_seconds: float) -> Figures:
    """Figures of two equal rounds of two answers."""
    found = Figures()
    seconds = milliseconds / 1000
    for _ in range(2):
        found.add(Measured([Answer(seconds / 2, seconds)] * 2, [], seconds=0.5), cpu_seconds)
    return found


def test_report_has_added_latency_and_the_ratio_of_each_round() -> None:
    wanted = loads(500.0, 100.0, 32)
    systems = {
        DIRECT: figures(1.0),
        "ours": figures(3.0, router=0.004),
        "smg": figures(2.0, smg=0.001),
        "Envoy with our picker": figures(4.0, picker=0.004, envoy=0.001),
    }
    results = {(name, load.name): found for name, found in systems.items() for load in wanted}

    lines = [
        line.split()
        for line in report(results, wanted, [*systems][1:], ["vllm-router"]).splitlines()
    ]

    assert lines[0] == ["Not", "installed", "here:", "vllm-router."]
    opened = [line for line in lines if "500" in line and line[1] == "ours"]
    assert opened[0][:13] == [
        "|",
        "ours",
        "|",
        "2",
        "[2",
        "-",
        "2]",
        "|",
        "2",
        "[2",
        "-",
        "2]",
        "|",
    ]
    closed = [line for line in lines if line[1:2] == ["smg"] and "0.25" in line]
    assert len(closed) == 2  # of whole and of streamed answers
    parts = [line[1:6] for line in lines if line[2:4] == ["of", "it"]]
    assert parts == [["picker", "of", "it", "|", "500"], ["envoy", "of", "it", "|", "2000"]] * 2


def test_bench_asks_for_what_the_fakes_tell_apart() -> None:
    assert b'"stream": true' in STREAMED.request()
    assert b'"seed": %d' % router_fakes.STREAM_SEED in STREAMED.request()
    assert b"stream" not in WHOLE.request()
    assert router_load.ANSWER_SECONDS > NUM_TOKENS * router_fakes.TOKEN_SECONDS
