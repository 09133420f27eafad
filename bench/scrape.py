"""CPU time of the operator's scraper: many workers with real-sized pages, at the autoscaler's pace.

    bench/scrape.py [--workers 200] [--interval-seconds 5] [--rounds 12]

The workers are HTTP listeners of another process, one port each, which keep
connections open and answer with pages of the worker's own registry whose
counters grow.  Measured is the process that scrapes: fetching, parsing,
windows, rates and what it exports.  Exits 1 when it takes more than LIMIT of a
core, or when a scrape missed.
"""

import argparse
import asyncio
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from prometheus_client import CollectorRegistry, generate_latest

from pdcluster_operator.scrape.page import ScrapeTarget
from pdcluster_operator.scrape.scraper import ScrapeMetrics, Scraper, scrape_round
from pdcluster_operator.scrape.windows import Windows
from pdcluster_worker.metrics import Metrics

LIMIT = 0.5
CLUSTER = ("bench", "chat")
STALE_AFTER = 3


@dataclass(frozen=True)
class Figures:
    """Measurements.  cpu_seconds and round_seconds: one for each round; the first, which connects,
    is not among them.
    """

    workers: int
    interval_seconds: float
    page_bytes: int
    cpu_seconds: Sequence[float]
    round_seconds: Sequence[float]
    num_misses: int

    @property
    def core_ratio(self) -> float:
        """Share of one core."""
        return sum(self.cpu_seconds) / len(self.cpu_seconds) / self.interval_seconds

    def __str__(self) -> str:
        mean = sum(self.cpu_seconds) / len(self.cpu_seconds)
        return (
            f"{self.workers} workers, pages of {self.page_bytes} bytes, {len(self.cpu_seconds)} "
            f"rounds every {self.interval_seconds:g} s: "
            f"CPU {mean:.3f} s a round (most {max(self.cpu_seconds):.3f} s), {self.core_ratio:.1%} "
            f"of one core (limit {LIMIT:.0%}); "
            f"a round took {max(self.round_seconds):.2f} s at most; {self.num_misses} misses; load "
            f"average {os.getloadavg()[0]:.1f}"
        )


def pages(number: int) -> list[bytes]:
    """Answers of a busy worker, one after the other, as its own registry writes them."""
    metrics = Metrics()
    for state in ("free", "cached", "in_use", "receiving", "quarantined"):
        metrics.kv_blocks.labels(state).set(12345)
    for role in ("prefill", "decode"):
        for state in ("starting", "ready", "draining", "drained"):
            metrics.peers.labels(role, state).set(100)
    found = []
    for _ in range(number):
        _serve_some(metrics)
        found.append(generate_latest(metrics.registry))
    return found


def _serve_some(metrics: Metrics) -> None:
    for gauge in (
        metrics.num_requests_running,
        metrics.num_requests_waiting,
        metrics.prefill_queue_requests,
    ):
        gauge.set(37)
    metrics.prefill_queue_tokens.set(123456)
    metrics.kv_cache_usage_ratio.set(0.734512345)
    metrics.engine_busy_ratio.set(0.812345678)
    for counter in (
        metrics.prompt_tokens,
        metrics.prefill_tokens,
        metrics.generation_tokens,
        metrics.engine_steps,
    ):
        counter.inc(123456)
    for counter in (
        metrics.prefill_seconds,
        metrics.decode_seconds,
        metrics.engine_overhead_seconds,
    ):
        counter.inc(1.23456789)
    for latency in (
        metrics.time_to_first_token_seconds,
        metrics.time_per_output_token_seconds,
        metrics.inter_token_latency_seconds,
    ):
        latency.observe(0.123456789)
    for phase in ("queue", "prefill", "transfer", "first_step"):
        metrics.ttft_phase_seconds.labels(phase).observe(0.0456)
    for kind in ("prefill", "decode", "mixed"):
        metrics.engine_step_seconds.labels(kind).observe(0.0234)
    for reason in ("stop", "length", "abort"):
        metrics.request_success.labels(reason).inc()


class WorkerListener(asyncio.Protocol):
    """Answers every request of a connection with the next page; all listeners share the answers."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = answers
        self._num_answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"\r\n\r\n")):
            self._transport.write(self._answers[min(self._num_answered, len(self._answers) - 1)])
            self._num_answered += 1


def serve_workers(pipe: Connection, workers: int, number_of_pages: int) -> None:
    """The other process: listens, says its ports and the size of a page, and ends when the pipe is
    closed.
    """
    texts = pages(number_of_pages)
    head = (
        "HTTP/1.1 200 OK\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\ncontent-length: "
        "{}\r\ncontent-type: text/plain; version=1.0.0\r\n\r\n"
    )
    answers = [head.format(len(text)).encode() + text for text in texts]

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
        servers = [
            await loop.create_server(lambda: WorkerListener(answers), sock=one) for one in bound
        ]
        pipe.send(([one.getsockname()[1] for one in bound], len(texts[-1])))
        await loop.run_in_executor(None, _wait_for_end, pipe)
        for server in servers:
            server.close()

    asyncio.run(serve())


def _wait_for_end(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return


async def measure(
    targets: Sequence[ScrapeTarget], page_bytes: int, interval_seconds: float, rounds: int
) -> Figures:
    """Scrape at the pace, as the operator does, and export after each round."""
    cpu, wall = [], []
    registry = CollectorRegistry()
    async with Scraper() as scraper:
        windows = Windows(CLUSTER)
        metrics = ScrapeMetrics(registry, lambda: (windows,), time.monotonic)
        for _ in range(rounds + 1):
            cpu_start, start = time.process_time(), time.monotonic()
            await scrape_round(scraper, metrics, windows, targets, STALE_AFTER)
            wall.append(time.monotonic() - start)
            windows.pools()
            generate_latest(registry)
            await asyncio.sleep(max(0.0, start + interval_seconds - time.monotonic()))
            cpu.append(time.process_time() - cpu_start)
    return Figures(
        len(targets), interval_seconds, page_bytes, cpu[1:], wall[1:], _num_misses(registry)
    )


def _num_misses(registry: CollectorRegistry) -> int:
    samples = [sample for family in registry.collect() for sample in family.samples]
    return int(
        sum(
            sample.value
            for sample in samples
            if sample.name == "pdcluster_operator_scrape_misses_total"
        )
    )


def run(workers: int, interval_seconds: float, rounds: int) -> Figures:
    """Start the workers' process, measure, end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_workers, args=(theirs, workers, rounds + 1))
    process.start()
    theirs.close()
    try:
        ports, page_bytes = ours.recv()
        targets = [
            ScrapeTarget(CLUSTER, *_pool(number), f"chat-{number}", f"127.0.0.1:{port}")
            for number, port in enumerate(ports)
        ]
        return asyncio.run(measure(targets, page_bytes, interval_seconds, rounds))
    finally:
        ours.close()
        process.join()


def _pool(number: int) -> tuple[str, str]:
    return ("prefill", "b200") if number % 3 == 0 else ("decode", "b300")


def main(arguments: Sequence[str]) -> int:
    """Parse, measure, print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--interval-seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args(arguments)
    figures = run(options.workers, options.interval_seconds, options.rounds)
    print(figures)
    return 1 if figures.core_ratio > LIMIT or figures.num_misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
