"""CPU of the server process for each streamed token and for each request: everything but the engine
and the peers.

    python bench/server_path.py [--streams 1 16 64] [--tokens 200] [--requests 300] [--warm]
        [--profile]

The real application on uvloop.  The engine is played: it sends the frames of a
real one, one a step, to the real EngineClient.  What is counted is the CPU time of
this process, user and system, so run it on a machine with nothing else on it:
first to the bytes handed to the HTTP server, then over loopback sockets to a
client process, the kernel's work included.  Between two steps memory is read, which
does not count, so caches are as cold as an engine's step on the same core leaves
them; with `--warm` they stay as they are.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import uvloop
from starlette.types import ASGIApp, Message

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import AdmissionSpec
from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import EngineReady, Submit, Tokens
from pdcluster_worker.messages.facts import DeviceFacts, KVGeometry
from pdcluster_worker.messages.overview import ClusterOverview
from pdcluster_worker.messages.requests import FinishReason, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.processes.lifecycle import settle_memory
from pdcluster_worker.server.app import create_app
from pdcluster_worker.server.generation.generation import AdapterControl
from pdcluster_worker.server.http.run import serve
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.decode_dispatcher import DecodeDispatcher
from pdcluster_worker.serving.decode.remote_prefill import RemotePrefill
from pdcluster_worker.serving.engines.client import EngineClient
from pdcluster_worker.serving.engines.engines import Engine, Engines
from pdcluster_worker.serving.ingress.ingress import Ingress
from pdcluster_worker.serving.worker_context import WorkerContext

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct")
STEP_SECONDS = 0.005
VOCABULARY = 49152
PROMPT = "Write about the sea, the wind and one small boat that is late for dinner. " * 4

WEIGHTS = bytearray(64 << 20)
"""Read between two steps, as a model's are."""

READER = """
import selectors, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
request, end = sys.stdin.buffer.read(), b"0\\r\\n\\r\\n"
chosen = selectors.DefaultSelector()
for _ in range(count):
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall(request)
    chosen.register(s, selectors.EVENT_READ)
while chosen.get_map():
    for key, _ in chosen.select():
        data = key.fileobj.recv(1 << 16)
        if not data or data.endswith(end):
            chosen.unregister(key.fileobj)
            key.fileobj.close()
"""

ASKER = """
import socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
request = sys.stdin.buffer.read()
s = socket.create_connection(("127.0.0.1", port))
for _ in range(count):
    s.sendall(request)
    data = b""
    while True:
        data += s.recv(1 << 16)
        head, mark, body = data.partition(b"\\r\\n\\r\\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\\r\\n")[0]
        if mark and len(body) >= int(length):
            break
    assert data.startswith(b"HTTP/1.1 200"), data
"""


class PlayedEngine:
    """A FrameSocket whose other end makes one token a step for each request that it was given."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.arrived = asyncio.Event()
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()

    async def recv(self) -> bytes:
        return await self._frames.get()

    async def send(self, data: bytes) -> None:
        for message in messages.decode_inputs(data):
            if isinstance(message, Submit):
                self.waiting.append(message.spec.request_id)
                self.arrived.set()

    def step(self, names: Sequence[str], ids: Sequence[int], reason: FinishReason | None) -> None:
        tokens = [
            Token(name, token_id, finish_reason=reason)
            for name, token_id in zip(names, ids, strict=True)
        ]
        self._frames.put_nowait(messages.encode([Tokens(tokens)]))


DEVICE = DeviceFacts("cpu", "played")


class Backend:
    """A decode worker without peers."""

    model_name, max_model_len, vocab_size, length_note = "m", 4096, VOCABULARY, ""
    adapters: Mapping[str, str] = MappingProxyType({})
    scheduler: str | None = "continuous"
    device: DeviceFacts | None = DEVICE

    def __init__(self, ingress: Ingress) -> None:
        self.generate = ingress.generate
        self.abort = ingress.abort

    def ready(self) -> None: ...

    def alive(self) -> None: ...

    def shortfall(self) -> None: ...

    def draining(self) -> bool:
        return False

    def num_ingresses(self) -> int:
        return 1

    def adapter_calls(self) -> AdapterControl:
        raise NotImplementedError("no adapter is loaded here")

    def overview(self) -> ClusterOverview:
        raise NotImplementedError("no browser is served here")


def make_backend(client: EngineClient, metrics: Metrics, policy: PolicyConfig) -> Backend:
    facts = EngineReady(
        *("e", [1], KVGeometry(3, 64, 30, 16, "float32"), "w", "float32"),
        num_blocks=4096,
        max_model_len=4096,
        vocab_size=VOCABULARY,
        device=DEVICE,
        transport="tcp",
    )
    worker = WorkerContext("mixed", Engines(Engine(client, facts, "127.0.0.1:1")), metrics, policy)
    worker.state = "ready"
    broker = CreditBroker(worker.credit_queue, list, PrefillScoreSpec, worker.block_size)
    return Backend(
        Ingress(worker, DecodeDispatcher(worker, RemotePrefill(worker, broker), list, list), list)
    )


def http_request(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def start(script: str, port: int, count: int, request: bytes) -> asyncio.subprocess.Process:
    with tempfile.TemporaryFile() as file:
        file.write(request)
        file.seek(0)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(port), str(count), stdin=file
        )


async def call(app: ASGIApp, content: bytes) -> None:
    """One request without a socket; what is sent is dropped."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": headers,
        "query_string": b"",
        "state": {},
    }
    pending = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        return pending.pop() if pending else await asyncio.get_running_loop().create_future()

    async def send(message: Message) -> None: ...

    await app(scope, receive, send)


async def steps_cpu(
    engine: PlayedEngine, target: ASGIApp | int, streams: int, tokens: int, *, is_cold: bool
) -> float:
    """Seconds of CPU of so many steps.  target: an application, or the port of one."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "max_tokens": tokens,
    }
    client: Awaitable[object]
    if isinstance(target, int):
        client = (await start(READER, target, streams, http_request(body))).wait()
    else:
        content = json.dumps(body).encode()
        client = asyncio.gather(*(call(target, content) for _ in range(streams)))
    while len(engine.waiting) < streams:
        await engine.arrived.wait()
        engine.arrived.clear()
    await asyncio.sleep(0.2)
    names, engine.waiting = engine.waiting, []
    draw = random.Random(0)
    before, cooling = time.process_time(), 0.0
    for step in range(tokens):
        ids = [draw.randrange(1000, VOCABULARY) for _ in names]
        if is_cold:
            cooling += cool()
        engine.step(names, ids, "length" if step == tokens - 1 else None)
        await asyncio.sleep(STEP_SECONDS)
    await client
    return time.process_time() - before - cooling


def cool() -> float:
    """Take the caches, and return the seconds of CPU that this took."""
    before = time.process_time()
    WEIGHTS.count(1)
    return time.process_time() - before


async def stream(engine: PlayedEngine, target: ASGIApp | int, options: argparse.Namespace) -> None:
    """Print the CPU of a streamed token, beyond that of steps without any."""
    place = "over sockets" if isinstance(target, int) else "to the HTTP server"
    floor = await steps_cpu(engine, target, 0, options.tokens, is_cold=not options.warm)
    print(f"{place}: {floor / options.tokens * 1e6:.0f} us of CPU a step without tokens")
    for streams in options.streams:
        cpu = await steps_cpu(engine, target, streams, options.tokens, is_cold=not options.warm)
        a_token = (cpu - floor) / (streams * options.tokens)
        print(
            f"{place}: {streams} streams: {a_token * 1e6:.1f} us of CPU a token, "
            f"{cpu / options.tokens * 1e6:.0f} us a step"
        )


async def ask(engine: PlayedEngine, port: int, requests: int) -> None:
    """Print the CPU of a request for one token."""
    body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    client = asyncio.create_task((await start(ASKER, port, requests, http_request(body))).wait())
    before = time.process_time()
    while not client.done():
        await asyncio.wait(
            {client, arriving := asyncio.create_task(engine.arrived.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        arriving.cancel()
        engine.arrived.clear()
        names, engine.waiting = engine.waiting, []
        engine.step(names, [1234] * len(names), "length")
    cpu = time.process_time() - before
    assert client.result() == 0, "the client failed"
    print(
        f"{requests} chat requests of {len(PROMPT)} characters, one token each: "
        f"{cpu / requests * 1e3:.2f} ms of CPU a request"
    )


async def main(options: argparse.Namespace) -> None:
    policy = PolicyConfig(admission=AdmissionSpec(max_queued_requests=4096))
    engine, metrics = PlayedEngine(), Metrics()
    client = EngineClient(engine)
    moving = asyncio.create_task(client.run())
    tokenizer = Tokenizer.load(MODEL.expanduser())
    for token_id in range(VOCABULARY):
        tokenizer.piece(token_id)  # spelled once in a process, and known to one that has served
    app = create_app(make_backend(client, metrics, policy), tokenizer, metrics, lambda: policy)
    server = await serve(app, "127.0.0.1", 0)
    settle_memory()
    for target in (app, server.port):
        await stream(engine, target, options)
    if options.requests:
        await ask(engine, server.port, options.requests)
    await server.close()
    moving.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            uvloop.run(main(arguments))
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    else:
        uvloop.run(main(arguments))
