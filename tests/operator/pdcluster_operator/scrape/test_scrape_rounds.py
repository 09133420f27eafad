"""Rounds over real listeners: windows, what is exported, what is said, and what is forgotten."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdcluster_operator.scrape.page import ScrapeTarget
from pdcluster_operator.scrape.scraper import ScrapeLimits, ScrapeMetrics, Scraper, scrape_round
from pdcluster_operator.scrape.windows import Windows
from tests.operator.pdcluster_operator.scrape.worker_servers import (
    CHAT,
    WorkerServer,
    hangs_after,
    http,
    sends,
    serves,
)
from tests.worker_pages import WorkerPages

KEY = ("prefill", "cpu")
CODE = ("serving", "code")
LABELS = {"namespace": "serving", "pdcluster": "chat", "role": "prefill", "pool": "cpu"}


@dataclass
class FakeClock:
    """A clock that moves only when a test moves it."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class FakeProcess:
    """The parts of one operator process."""

    def __init__(self, scraper: Scraper, clock: FakeClock) -> None:
        self.registry = CollectorRegistry()
        self.clusters = {CHAT: Windows(CHAT), CODE: Windows(CODE)}
        self.windows = self.clusters[CHAT]
        self.scrapes = ScrapeMetrics(self.registry, self.clusters.values, clock)
        self.scraper = scraper

    async def run(self, targets: list[ScrapeTarget], stale_after: int) -> None:
        """One round of the cluster of this test."""
        await scrape_round(self.scraper, self.scrapes, self.windows, targets, stale_after)

    def value(self, name: str, **labels: str) -> float | None:
        """An exported number of the pool of this test."""
        return self.registry.get_sample_value(
            f"pdcluster_operator_pool_{name}", {**LABELS, **labels}
        )

    def misses(self, reason: str) -> float | None:
        """Exported misses."""
        labels = {"namespace": "serving", "pdcluster": "chat", "reason": reason}
        return self.registry.get_sample_value("pdcluster_operator_scrape_misses_total", labels)


@asynccontextmanager
async def two_scraped(clock: FakeClock) -> AsyncIterator[tuple[FakeProcess, WorkerServer]]:
    """A process after a round of two workers, p-0 and p-1, the latter with twice the numbers; and
    p-1.
    """
    workers = [WorkerPages(), WorkerPages()]
    for number, worker in enumerate(workers, 1):
        worker.set(
            prefill_queue_requests=number,
            prefill_queue_tokens=100 * number,
            num_requests_running=number,
        )
        worker.set(
            num_requests_waiting=2 * number,
            kv_cache_usage_ratio=0.25 * number,
            engine_busy_ratio=0.5 * number,
        )
    async with (
        WorkerServer(serves(lambda: http(workers[0].text()))) as first,
        WorkerServer(serves(lambda: http(workers[1].text()))) as second,
        Scraper(clock=clock) as scraper,
    ):
        process = FakeProcess(scraper, clock)
        await process.run([first.target("p-0"), second.target("p-1")], 3)
        yield process, second


async def test_what_was_seen_is_exported(clock: FakeClock):
    async with two_scraped(clock) as (process, _):
        names = (
            "prefill_queue_requests",
            "prefill_queue_tokens",
            "num_requests_running",
            "num_requests_waiting",
        )
        assert [process.value(name) for name in names] == [3, 300, 3, 6]
        assert [process.value(name) for name in ("kv_cache_usage_ratio", "engine_busy_ratio")] == [
            0.375,
            0.75,
        ]
        assert [process.value("scraped_workers", state=state) for state in ("fresh", "stale")] == [
            2,
            0,
        ]
        clock.now += 7.0
        assert process.value("sample_age_seconds") == 7.0
        assert process.registry.get_sample_value("pdcluster_operator_scrape_seconds_count") == 2


async def test_of_a_worker_on_its_way_out_only_the_queue_is_exported(clock: FakeClock):
    async with two_scraped(clock) as (process, second):
        process.windows.leave({"p-1"})

        names = (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_ratio",
            "engine_busy_ratio",
        )
        assert [
            process.value(name) for name in ("prefill_queue_requests", "prefill_queue_tokens")
        ] == [3, 300]
        assert [process.value(name) for name in names] == [1, 2, 0.25, 0.5]
        assert process.value("scraped_workers", state="fresh") == 1
        clock.now += 7.0
        await process.run([ScrapeTarget(CHAT, *KEY, "p-0", "127.0.0.1:1"), second.target("p-1")], 0)
        assert [process.value("scraped_workers", state=state) for state in ("fresh", "stale")] == [
            0,
            1,
        ]
        assert [process.value(name) for name in (*names, "sample_age_seconds")] == [None] * 5
        assert process.value("prefill_queue_requests") == 2
        process.windows.leave(set())
        assert process.value("kv_cache_usage_ratio") == 0.5


async def test_stale_pool_exports_its_age_and_no_numbers(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    page = http(WorkerPages().text())
    async with (
        WorkerServer(sends(page)) as server,
        Scraper(ScrapeLimits(total_seconds=0.2), clock=clock) as scraper,
    ):
        process = FakeProcess(scraper, clock)
        await process.run([server.target()], 1)
        server.behaviour = sends(http(b"", status="500 Oh"))
        await process.run([server.target()], 1)
        assert process.value("prefill_queue_requests") == 0
        assert caplog.messages == []
        server.behaviour = hangs_after()
        for _ in range(2):
            await process.run([server.target()], 1)
        assert process.value("prefill_queue_requests") is None
        assert [process.value("scraped_workers", state=state) for state in ("fresh", "stale")] == [
            0,
            1,
        ]
        assert process.value("sample_age_seconds") is None
        assert [process.misses(reason) for reason in ("status", "timeout")] == [1, 2]
        assert [miss.reason for miss in process.windows.stale().values()] == ["timeout"]
        server.behaviour = sends(page)
        await process.run([server.target()], 1)

    assert caplog.messages == [
        "worker stale cluster=serving/chat pod=p-0 reason=timeout: no whole answer within 0.2 s",
        "worker no longer stale cluster=serving/chat pod=p-0",
    ]


async def test_worker_that_leaves_while_stale_is_not_reported_as_back(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with (
        WorkerServer(sends(http(b""))) as bad,
        WorkerServer(sends(http(WorkerPages().text()))) as good,
        Scraper(clock=clock) as scraper,
    ):
        process = FakeProcess(scraper, clock)
        for _ in range(2):
            await process.run([bad.target("p-1"), good.target("p-0")], 1)
        await process.run([good.target("p-0")], 1)

    assert [message.split(" ")[1] for message in caplog.messages] == ["stale"]


async def test_cluster_that_is_gone_is_exported_no_more(clock: FakeClock):
    async with (
        WorkerServer(sends(http(b""))) as bad,
        WorkerServer(sends(http(WorkerPages().text()))) as good,
        Scraper(clock=clock) as scraper,
    ):
        process = FakeProcess(scraper, clock)
        for cluster, windows in process.clusters.items():
            targets = [bad.target("p-0", cluster=cluster), good.target("p-1", cluster=cluster)]
            await scrape_round(scraper, process.scrapes, windows, targets, 3)
        del process.clusters[CHAT]
        process.scrapes.forget(CHAT)

    page = generate_latest(process.registry).decode()
    assert 'pdcluster="chat"' not in page
    assert 'pdcluster="code"' in page


async def test_cancelled_round_leaves_the_window_as_it_was(clock: FakeClock, wait_until):
    async with (
        WorkerServer(sends(http(WorkerPages().text()))) as server,
        Scraper(clock=clock) as scraper,
    ):
        process = FakeProcess(scraper, clock)
        await process.run([server.target()], 3)
        before = process.windows.pools()
        server.behaviour = hangs_after()
        running = asyncio.create_task(process.run([server.target()], 3))
        await wait_until(lambda: len(server.requests) == 2, "the worker is being scraped")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert process.windows.pools() == before
