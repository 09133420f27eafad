"""Time and CPU of the calls between two workers, over mutual TLS on loopback: both ends, and no
engine behind them.

    python bench/peer_calls.py [--against FOLDER] [--rounds 9]

Each round measures this tree in a process of its own and then the worker's sources in FOLDER
(`worker/src` of another commit); medians, and their ratio.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from pdcluster_worker.config.worker import TLSConfig
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Generated, Hello, Report, WorkerLoad
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.peers.client import NO_EVENTS, LocalWorker, Peer
from pdcluster_worker.peers.pair_check import Refusals
from pdcluster_worker.peers.records import WorkerRecord
from pdcluster_worker.peers.service import WorkerService, start_grpc
from pdcluster_worker.peers.tls import Credentials
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.prefix_index import PrefixIndex
from pdctl.local.run_directory import make_certificates

GEOMETRY = KVGeometry(num_kv_heads=3, head_dim=64, num_layers=30, block_size=16, dtype="bfloat16")
NUM_TOKENS = 100
TARGET = TransferTarget(bytes(16), "d", ["127.0.0.1:9"], 0, list(range(63)))
HASHES = tuple(number.to_bytes(32) for number in range(32))


class Handler:
    """Answers at once; a token in each turn of the event loop."""

    def __init__(self) -> None:
        self.engine_id = "p"
        self.needs_credit = False
        self.ledger = CreditLedger(1)
        self.num_reports = 0

    def hello(self) -> Hello:
        return Hello("p", "prefill", GEOMETRY, "w", "r1")

    async def generate(self, spec: RequestSpec, prefill: str) -> AsyncIterator[Generated]:
        for _ in range(NUM_TOKENS - 1):
            yield Generated(Token(spec.request_id, 7))
            await asyncio.sleep(0)
        yield Generated(Token(spec.request_id, 7, finish_reason="length"))

    async def prefill(
        self, _: str, spec: RequestSpec, target: TransferTarget
    ) -> AsyncIterator[Token | PrefillDone]:
        yield Token(spec.request_id, 7)
        yield PrefillDone(spec.request_id, 4096, 0.5, checksum=7)

    async def watch(self) -> AsyncIterator[Report]:
        yield Report(WorkerLoad(), snapshot=True)
        sent = 0
        while True:
            while sent >= self.num_reports:  # noqa: ASYNC110 - an event would be timed too
                await asyncio.sleep(0)
            sent += 1
            yield Report(WorkerLoad(num_running=3, progress=sent), stored=HASHES)


async def measure(folder: Path) -> dict[str, tuple[float, float]]:
    """Microseconds of time and of CPU by what was called."""
    make_certificates(folder)
    names = {"ca": "ca.pem", "certificate": "worker.pem", "key": "worker.key"}
    credentials = Credentials(TLSConfig(**{key: str(folder / name) for key, name in names.items()}))
    handler: Any = Handler()
    refusals, index = Refusals(Metrics()), PrefixIndex()
    server, port = await start_grpc(WorkerService(handler, refusals), "127.0.0.1", 0, credentials)
    record = WorkerRecord(
        engine_id="p",
        pod="p",
        grpc_address=f"127.0.0.1:{port}",
        kv_address="",
        http_address="",
        role="prefill",
        pool="",
        state="ready",
    )
    hello = Hello("d", "decode", GEOMETRY, "w", "r1")
    peer = Peer(record, LocalWorker(hello, credentials, refusals, index), NO_EVENTS)
    while not peer.ready:  # noqa: ASYNC110 - a peer has no event for it
        await asyncio.sleep(0.01)

    def spec(number: int, num_prompt: int) -> RequestSpec:
        return RequestSpec(
            f"q{number}", list(range(num_prompt)), SamplingParams(NUM_TOKENS, seed=3)
        )

    async def prefill(num_prompt: int) -> None:
        async for _ in peer.prefill(spec(0, num_prompt), TARGET):
            pass

    async def generate(number: int) -> None:
        async for _ in peer.generate(spec(number, 100), "auto"):
            pass

    async def generate_many() -> None:
        await asyncio.gather(*map(generate, range(64)))

    async def reports() -> None:
        handler.num_reports += 500
        while peer.load.progress < handler.num_reports:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)

    times = {
        "handshake": await timed(peer._shake_hands, 300, 300),
        "prefill, 100 tokens": await timed(lambda: prefill(100), 300, 300),
        "prefill, 10,000 tokens": await timed(lambda: prefill(10_000), 100, 100),
        "token, 1 stream": await timed(lambda: generate(0), 10, 10 * NUM_TOKENS),
        "token, 64 streams": await timed(generate_many, 5, 5 * 64 * NUM_TOKENS),
        "report, 32 hashes": await timed(reports, 2, 1000),
    }
    await peer.close()
    await server.stop(None)
    return times


async def timed(
    call: Callable[[], Awaitable[Any]], num_calls: int, num_items: int
) -> tuple[float, float]:
    await call()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        await call()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return 1e6 * seconds / num_items, 1e6 * cpu_seconds / num_items


def measured(source: str) -> dict[str, tuple[float, float]]:
    environment = {**os.environ, "PYTHONPATH": source}
    output = subprocess.run(
        [sys.executable, __file__, "--child"], env=environment, capture_output=True, check=True
    ).stdout
    times: dict[str, tuple[float, float]] = json.loads(output)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", default="")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(uvloop.run(measure(Path(folder)))))
        return
    rounds = [
        [measured(source) for source in ("", options.against)[: 1 + bool(options.against)]]
        for _ in range(options.rounds)
    ]
    for name in rounds[0][0]:
        for position, kind in enumerate(("time", "CPU")):
            of = [[tree[name][position] for tree in trees] for trees in rounds]
            shown = [f"{statistics.median(column):9.1f}" for column in zip(*of, strict=True)]
            ratios = sorted(trees[0] / trees[-1] for trees in of)
            ratio = f"  ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{name:24} {kind:4}, us {' '.join(shown)}{ratio}")


if __name__ == "__main__":
    main()
