"""A small HTTP server that answers as vLLM's token API does, or fails as a test wants."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
process_start_time_seconds 1.79542970805e+09
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 350.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 140.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 12.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="waiting_to_start"} 0.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="in_progress"} 0.0
vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="m",stage="completed_waiting"} 0.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 4.42368e+06
vllm:cache_config_info{block_size="4",enable_prefix_caching="True",kv_cache_max_concurrency="1.0",\
kv_cache_size_tokens="64",num_gpu_blocks="16"} 1.0
"""


def metrics_of(num_ranks: int) -> str:
    """Numbers of several ranks: each the same ones under its own label, and blocks of all in each,
    as vLLM sums them.
    """
    lines = METRICS.replace('blocks="16"', f'blocks="{16 * num_ranks}"').splitlines()
    return "\n".join(
        line.replace('engine="0"', f'engine="{rank}"').replace(
            "info{block", f'info{{engine="{rank}",block'
        )
        for rank in range(num_ranks)
        for line in lines
        if rank == 0 or "vllm:" in line
    )


TRANSFER = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}


def tokens_event(*token_ids: int, reason: str | None = None) -> bytes:
    choice = {"index": 0, "token_ids": list(token_ids), "finish_reason": reason}
    return _event({"choices": [choice], "usage": None})


def end_events(cached_tokens: int = 0) -> bytes:
    usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def prefill_answer(cached_tokens: int = 0) -> bytes:
    usage = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return json.dumps({"choices": [], "usage": usage, "kv_transfer_params": TRANSFER}).encode()


@dataclass
class Call:
    """One request that has come.  is_broken: set when its connection ends first."""

    body: dict[str, Any]
    headers: dict[str, str]
    _writer: asyncio.StreamWriter
    is_broken: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(self, status: int = 200) -> None:
        head = f"HTTP/1.1 {status} X\r\ntransfer-encoding: chunked\r\n\r\n"
        await self._write(head.encode())

    async def send(self, data: bytes) -> None:
        await self._write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        await self._write(b"0\r\n\r\n")

    async def answer(self, data: bytes, status: int = 200) -> None:
        await self._write(
            f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )

    @property
    def connection(self) -> object:
        return self._writer

    def cut(self) -> None:
        self._writer.transport.abort()

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


@dataclass
class FakeVllm:
    """A server at `port`.

    calls: to the token API, in order; pages: answers to GET; late: of how many comes none at first
    """

    port: int = 0
    calls: "asyncio.Queue[Call]" = field(default_factory=asyncio.Queue)
    pages: dict[str, bytes] = field(
        default_factory=lambda: {"/metrics": METRICS.encode(), "/health": b""}
    )
    late: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def fake_vllm(port: int = 0) -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    server = await asyncio.start_server(_handler(fake), "127.0.0.1", port)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        await server.wait_closed()


def _handler(
    fake: FakeVllm,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call: Call | None = None
        try:
            while True:
                method, path, headers, body = await _request(reader)
                call = Call(body, headers, writer)
                if method == "GET" and fake.late.get(path, 0):
                    fake.late[path] -= 1
                elif method == "GET":
                    page = fake.pages.get(path)
                    await call.answer(page or b"", 200 if page is not None else 404)
                else:
                    fake.calls.put_nowait(call)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if call is not None:
                call.is_broken.set()
            writer.close()

    return serve


async def _request(
    reader: asyncio.StreamReader,
) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    length = int(headers.get("content-length", 0))
    body = json.loads(await reader.readexactly(length)) if length else {}
    return method, path, headers, body
