"""The load generator against servers and systems that answer well, badly or not at all."""

import asyncio
import json
from collections.abc import AsyncIterator

import client
import httpx
import pytest
from client import IncompleteAnswerError, OnChunk, run_workload, stream_completion
from workload import Workload

TOKEN = {"choices": [{"index": 0, "text": "a"}], "usage": None}
USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


def events(*bodies: object) -> bytes:
    return b"".join(b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n" for body in bodies)


async def ask(body: bytes, *, status: int = 200, piece_bytes: int = 7) -> tuple[int, int]:
    """(tokens, chunks) of an answer whose bytes arrive in small pieces, wherever that cuts them."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), piece_bytes):
            yield body[start : start + piece_bytes]

    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=pieces()))
    chunks: list[None] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1") as http:
        return await stream_completion(http, {}, lambda: chunks.append(None)), len(chunks)


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
async def test_stream_counts_chunks_and_takes_tokens_from_usage(piece_bytes: int) -> None:
    assert await ask(events(TOKEN, TOKEN, USAGE, b"[DONE]"), piece_bytes=piece_bytes) == (2, 2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (events(TOKEN, USAGE), "DONE"),
        (events(TOKEN, b"[DONE]"), "usage"),
        (events(TOKEN, {"error": {"message": "the engine died"}}), "the engine died"),
        (b"", "DONE"),
    ],
)
async def test_stream_that_is_not_complete_is_an_error(body: bytes, reason: str) -> None:
    with pytest.raises(IncompleteAnswerError, match=reason):
        await ask(body)


async def test_stream_with_another_status_is_an_error_that_shows_it() -> None:
    with pytest.raises(IncompleteAnswerError, match=r"HTTP 503.*queue is full"):
        await ask(b"queue is full", status=503)


async def test_stream_to_a_closed_port_is_an_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://127.0.0.1/v1") as http:
        with pytest.raises(IncompleteAnswerError, match="refused"):
            await stream_completion(http, {}, lambda: None)


class Echo:
    """Answers with as many tokens as asked less `missing`; remembers the most requests it had at a time."""

    def __init__(self, missing: int = 0) -> None:
        self.missing = missing
        self.num_now = self.num_most = 0

    async def generate(self, prompt: list[int], num_output_tokens: int, on_chunk: OnChunk) -> int:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        for _ in range(num_output_tokens - self.missing):
            await asyncio.sleep(0)
            on_chunk()
        self.num_now -= 1
        return num_output_tokens - self.missing


class Silent:
    """Never answers."""

    async def generate(self, prompt: list[int], num_output_tokens: int, on_chunk: OnChunk) -> int:
        await asyncio.Event().wait()
        return 0


async def test_closed_loop_keeps_its_concurrency_and_sends_all() -> None:
    echo = Echo()

    run = await run_workload(echo, Workload("closed", 8, 3, 7, rounds=1, concurrency=3), "seed", 300)

    assert (len(run.complete), echo.num_most) == (7, 3)
    assert {one.num_tokens for one in run.complete} == {3}
    assert run.duration_seconds > 0


async def test_open_loop_sends_each_request_at_or_after_its_time() -> None:
    run = await run_workload(Echo(), Workload("open", 8, 3, 5, rounds=1, rate=500.0), "seed", 300)

    assert len(run.complete) == 5
    assert all(one.started_seconds >= one.scheduled_seconds for one in run.answers)


async def test_answer_with_missing_tokens_is_a_failure() -> None:
    run = await run_workload(Echo(missing=1), Workload("closed", 8, 3, 2, rounds=1, concurrency=2), "seed", 300)

    assert run.failures == ["2 tokens in 2 chunks, expected 3 tokens"] * 2


async def test_answer_that_never_comes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_LIMIT_SECONDS", 0.01)

    run = await run_workload(Silent(), Workload("closed", 8, 3, 1, rounds=1, concurrency=1), "seed", 300)

    assert run.failures == ["no complete answer in 0.01 s"]
