"""Fake workers for `routing_overhead`: many in one process, which answer at once with the same few
tokens.

    bench/router_fakes.py http|grpc WORKERS [CERTIFICATES]

`http` speaks OpenAI's API, for routers that relay it; `grpc` what our decode workers speak to a
router, over mutual TLS with the files of the folder CERTIFICATES, a report of load every second
among it.  A streamed answer has a token each TOKEN_SECONDS, one write each; a whole one has no
pauses, and so is one message over gRPC.  Prints one line, the addresses as JSON,
and ends when its standard input does.
"""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import httptools
import uvloop
from msgspec.structs import replace

from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Generated, Hello, Report, TraceEvent, WorkerLoad, encode
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.peers.calls import SERVER_OPTIONS, method_handlers
from pdcluster_worker.peers.generate_service import GenerateService
from pdcluster_worker.peers.tls import Credentials

MODEL = "m"
REVISION = "r1"
NUM_TOKENS = 8
TOKEN_SECONDS = 0.002
REPORT_SECONDS = 1.0
STREAM_SEED = 1
"""Pace of a request whose tokens come one by one; any other is answered at once."""

_GEOMETRY = KVGeometry(3, 64, 30, 16, "float32")
CERTIFICATES = {"ca": "ca.pem", "certificate": "worker.pem", "key": "worker.key"}
"""Settings of `tls`, and their files in the folder of certificates."""
_WORD = " sea"
_TOKEN_ID = 5439  # of the sample model; any that is text would do


# --- OpenAI's API -----------------------------------------------------------------------------


def _whole() -> bytes:
    message = {"role": "assistant", "content": _WORD * NUM_TOKENS}
    usage = {"prompt_tokens": 64, "completion_tokens": NUM_TOKENS, "total_tokens": 64 + NUM_TOKENS}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }
    return _answer(body)


def _answer(body: object) -> bytes:
    content = json.dumps(body).encode()
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(content)
        + content
    )


def _events() -> list[bytes]:
    """The header and the first event, then one event each, then the end."""
    events = []
    for index in range(NUM_TOKENS):
        delta = {"role": "assistant", "content": _WORD} if index == 0 else {"content": _WORD}
        reason = "length" if index == NUM_TOKENS - 1 else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        body = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
        }
        events.append(_chunk(b"data: " + json.dumps(body).encode() + b"\n\n"))
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    events[0] = head + events[0]
    events[-1] += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return events


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE, EVENTS = _whole(), _events()
_INFO = {
    "status": "ok",
    "model_path": MODEL,
    "is_generation": True,
    "load": 0,
    "data": [{"id": MODEL, "object": "model"}],
}
INFO = _answer({**_INFO, "object": "list", "served_model_name": MODEL, "max_model_len": 4096})
"""Answers to the other requests of a router: health, models, load."""


class HttpWorker(asyncio.Protocol):
    """One connection of a router.  num_open: of all of them."""

    num_open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        HttpWorker.num_open += 1
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # smg asks whether HTTP/2 is spoken here
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        HttpWorker.num_open -= 1

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() != b"POST":
            self._transport.write(INFO)
        elif b'"stream":true' in self._body.replace(b" ", b""):
            self._stream(0)
        else:
            self._transport.write(WHOLE)

    def _stream(self, index: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(EVENTS[index])
        if index + 1 < len(EVENTS):
            asyncio.get_running_loop().call_later(TOKEN_SECONDS, self._stream, index + 1)


async def serve_http(workers: int) -> list[asyncio.Server]:
    """A server each."""
    loop = asyncio.get_running_loop()
    return [await loop.create_server(HttpWorker, "127.0.0.1", 0) for _ in range(workers)]


def addresses_of(servers: Sequence[asyncio.Server]) -> list[str]:
    """Each one's host:port."""
    return [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]


# --- what our workers speak -------------------------------------------------------------------


def _replies() -> list[Generated]:
    """A decode worker's, with the notes that it sends of its own decisions."""
    first = (
        TraceEvent("received", 0.0, {"role": "decode"}),
        TraceEvent(
            "offload",
            0.0001,
            {"to": "local", "rule": "rule", "uncached_tokens": 64, "threshold": 256, "queue": 0},
        ),
        TraceEvent("context_begin", 0.0002, {"queue_seconds": 0.0001}),
        TraceEvent("context_end", 0.0003, {"prefill": "local", "cached_tokens": 0}),
        TraceEvent("decoding_begin", 0.0003, {}),
    )
    last = (TraceEvent("decoding_end", 0.01, {"reason": "length"}),)
    replies = [Generated(Token("", _TOKEN_ID)) for _ in range(NUM_TOKENS)]
    begun = Token("", _TOKEN_ID, queue_seconds=0.0001, prefill_seconds=0.0001)
    replies[0] = Generated(begun, "local", notes=first)
    replies[-1] = Generated(Token("", _TOKEN_ID, finish_reason="length"), notes=last)
    return replies


REPLIES = _replies()


class GrpcWorker:
    """One decode worker behind our service's stream: a `Generates`."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id

    async def generate(self, spec: RequestSpec, _: str) -> AsyncGenerator[Generated, None]:
        is_paced = spec.sampling.seed == STREAM_SEED
        for index, reply in enumerate(REPLIES):
            if index and is_paced:
                await asyncio.sleep(TOKEN_SECONDS)
            token = replace(reply.token, request_id=spec.request_id)
            yield replace(reply, token=token)


class GrpcCalls:
    """The calls that a router makes of it."""

    def __init__(self, worker: GrpcWorker) -> None:
        self._worker = worker
        facts = (worker.engine_id, "decode", _GEOMETRY, "w", REVISION)
        self._hello = Hello(*facts, model=MODEL, max_model_len=4096, vocab_size=49152)

    async def handshake(self, message: bytes, context: Any) -> bytes:
        return encode(self._hello)

    async def watch(self, message: bytes, context: Any) -> None:
        sequence = 0
        while True:
            sequence += 1
            load = WorkerLoad(free_blocks=4096, total_blocks=4096)
            report = Report(load, snapshot=sequence == 1, sequence=sequence)
            await context.write(encode(report))
            await asyncio.sleep(REPORT_SECONDS)

    async def generate(self, frames: AsyncIterator[bytes], context: Any) -> None:
        await GenerateService(self._worker, context).serve(frames)


async def serve_grpc(workers: int, folder: Path) -> list[dict[str, str]]:
    files = TLSConfig(**{field: str(folder / name) for field, name in CERTIFICATES.items()})
    credentials, found = Credentials(files), []
    for number in range(workers):
        engine_id = f"engine-{number}"
        server = grpc.aio.server(options=SERVER_OPTIONS)
        calls = GrpcCalls(GrpcWorker(engine_id))
        server.add_generic_rpc_handlers((method_handlers(calls),))
        port = server.add_secure_port("127.0.0.1:0", credentials.server())
        await server.start()
        _serving.append(server)
        found.append({"engine_id": engine_id, "address": f"127.0.0.1:{port}"})
    return found


_serving: list[grpc.aio.Server] = []  # one that is collected serves no more


async def main(kind: str, workers: int, folder: Path) -> None:
    if kind == "http":
        servers = await serve_http(workers)
        print(json.dumps(addresses_of(servers)), flush=True)
    else:
        print(json.dumps(await serve_grpc(workers, folder)), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3] if len(sys.argv) > 3 else ".")))
