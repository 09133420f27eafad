"""Fetch `/metrics` of many workers at once, over plain HTTP, with a bound on everything. A worker's
failure is a Miss of that worker alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean
from typing import Self

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from yarl import URL

from pdcluster_operator.scrape.page import (
    ClusterKey,
    MetricsPage,
    Miss,
    PageError,
    Reason,
    ScrapeResult,
    ScrapeTarget,
    parse_page,
)
from pdcluster_operator.scrape.windows import Windows
from pdcluster_schema.text import one_line

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_POOL = ("namespace", "pdcluster", "role", "pool")
_PREFIX = "pdcluster_operator_pool_"

# Field of WorkerSample -> (how the pool's workers make one number, help).
_NUMBERS: dict[str, tuple[Callable[[list[float]], float], str]] = {
    "prefill_queue_requests": (
        sum,
        "Requests of the prefill queue that the pool's workers hold, those that drain too.",
    ),
    "prefill_queue_tokens": (
        sum,
        "Tokens of the prefill queue that the pool's workers hold, those that drain too.",
    ),
    "num_requests_running": (sum, "Requests that run, over the pool's workers that stay."),
    "num_requests_waiting": (sum, "Requests that wait, over the pool's workers that stay."),
    "kv_cache_usage_ratio": (
        fmean,
        "Share of KV blocks that hold live tokens, mean of the pool's workers that stay.",
    ),
    "engine_busy_ratio": (
        fmean,
        "Share of time in an engine step, mean of the pool's workers that stay.",
    ),
}
_OF_ALL = ("prefill_queue_requests", "prefill_queue_tokens")


class ScrapeMetrics(Collector):
    """Counts every scrape, and shows what the windows of all clusters hold.

    windows: those that there are when the registry is collected
    clock:   that of the answers
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        windows: Callable[[], Iterable[Windows]],
        clock: Callable[[], float],
    ) -> None:
        self._seconds = Histogram(
            "pdcluster_operator_scrape_seconds",
            "Seconds of one scrape of one worker.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._misses = Counter(
            "pdcluster_operator_scrape_misses",
            "Scrapes that gave no numbers, by reason.",
            ["namespace", "pdcluster", "reason"],
            registry=registry,
        )
        self._windows = windows
        self._clock = clock
        registry.register(self)

    def count(self, results: Sequence[ScrapeResult]) -> None:
        for result in results:
            self._seconds.observe(result.seconds)
            if isinstance(result.result, Miss):
                self._misses.labels(*result.target.cluster, result.result.reason.value).inc()

    def forget(self, cluster: ClusterKey) -> None:
        self._misses.remove_by_labels({"namespace": cluster[0], "pdcluster": cluster[1]})

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ages = GaugeMetricFamily(
            f"{_PREFIX}sample_age_seconds",
            "Time since a worker of the pool that stays gave good numbers.",
            labels=_POOL,
        )
        workers = GaugeMetricFamily(
            f"{_PREFIX}scraped_workers",
            "Ready workers of the pool that stay: fresh ones count, stale ones have missed too "
            "many scrapes.",
            labels=(*_POOL, "state"),
        )
        numbers = {
            name: GaugeMetricFamily(_PREFIX + name, text, labels=_POOL)
            for name, (_, text) in _NUMBERS.items()
        }
        for windows in self._windows():
            for pool, sample in windows.newest().items():
                labels = (*windows.cluster, *pool)
                answered_at = windows.answered_at(pool)
                if answered_at is not None:
                    ages.add_metric(labels, self._clock() - answered_at)
                staying = [each for each in sample.workers if each.pod not in windows.leaving]
                workers.add_metric((*labels, "fresh"), len(staying))
                stale = [pod for pod in sample.stale if pod not in windows.leaving]
                workers.add_metric((*labels, "stale"), len(stale))
                for name, family in numbers.items():
                    found = sample.workers if name in _OF_ALL else staying
                    if found:  # of a pool without a fresh worker none: 0 would mean idle
                        over, _ = _NUMBERS[name]
                        family.add_metric(labels, over([getattr(each, name) for each in found]))
        yield ages
        yield workers
        yield from numbers.values()


logger = logging.getLogger(__name__)
_PATH = "/metrics"
# less than the workers keep an idle connection, so that this side closes first
_KEPT_SECONDS = 60.0
_MAX_REASON = 200  # characters: it goes into a log and a status


@dataclass(frozen=True)
class ScrapeLimits:
    concurrency: int = 64  # scrapes at one time, over all clusters
    # scrapes at one time of one cluster: its slow workers leave turns to the others
    of_one_cluster: int = 8
    connect_seconds: float = 1.0  # until a worker's connection stands
    total_seconds: float = 2.0  # of one scrape, connecting included, the wait for its turn not
    page_bytes: int = 256 * 1024  # a worker's page is some 20 KiB


class Scraper:
    """An async context manager: leaving it closes every connection.

    `clock` gives monotonic seconds.
    """

    def __init__(
        self, limits: ScrapeLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or ScrapeLimits()
        self.clock = clock
        self._turns = asyncio.Semaphore(self._limits.concurrency)

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._session = aiohttp.ClientSession(
            # The semaphore is the bound; a connector's own would let the wait for a turn count
            # against the time of a scrape.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=limits.total_seconds, connect=limits.connect_seconds
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def scrape(self, targets: Sequence[ScrapeTarget]) -> list[ScrapeResult]:
        """Scrape all workers of one cluster; an answer for each target, in their order."""
        own = asyncio.Semaphore(self._limits.of_one_cluster)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._scrape_one(target, own)) for target in targets]
        return [task.result() for task in tasks]

    async def _scrape_one(self, target: ScrapeTarget, own: asyncio.Semaphore) -> ScrapeResult:
        async with own, self._turns:
            started = self.clock()
            result = await self._page_or_miss(target.address)
            ended = self.clock()
        return ScrapeResult(target, ended, ended - started, result)

    async def _page_or_miss(self, address: str) -> MetricsPage | Miss:
        url = _metrics_url(address)
        if url is None:
            message = f"{address!r} is no host:port (an IPv6 host stands in brackets)"
            return Miss(Reason.ADDRESS, message)
        try:
            body = await self._fetch(url)
            return body if isinstance(body, Miss) else parse_page(body)
        except PageError as e:
            return Miss(Reason.BAD_PAGE, f"its page is not believed: {e}")
        except TimeoutError:
            return Miss(Reason.TIMEOUT, f"no whole answer within {self._limits.total_seconds:g} s")
        except aiohttp.ClientConnectorError as e:
            return Miss(Reason.CONNECT, f"no connection to {address}: {e.strerror}")
        except (aiohttp.ClientError, OSError, ValueError) as e:
            # one short line: an error of the HTTP parser shows what the server sent
            cause = one_line(str(e), _MAX_REASON) or type(e).__name__
            return Miss(Reason.BROKEN, f"the connection broke or did not speak HTTP: {cause}")

    async def _fetch(self, url: URL) -> bytes | Miss:
        """The body.  Raises what aiohttp raises, and TimeoutError."""
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                message = f"it answered with status {response.status} instead of 200"
                return Miss(Reason.STATUS, message)
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > self._limits.page_bytes:
                    message = f"its page has more than {self._limits.page_bytes} bytes"
                    return Miss(Reason.TOO_LARGE, message)
            return bytes(body)


def _metrics_url(address: str) -> URL | None:
    """None for what is no host:port: nothing of it may become a path, a user or another port."""
    try:
        url = URL(f"http://{address}{_PATH}")
    except ValueError:
        return None
    return url if f"{url.host_subcomponent}:{url.explicit_port}" == address.lower() else None


async def scrape_round(
    scraper: Scraper,
    metrics: ScrapeMetrics,
    windows: Windows,
    targets: Sequence[ScrapeTarget],
    stale_after: int,
) -> None:
    """Scrape a cluster's ready workers once; targets that are no longer named are forgotten.  One
    round of a cluster at a time. Cancelled, it leaves the windows as they were.
    """
    results = await scraper.scrape(targets)
    before = windows.stale().keys() & {target.pod for target in targets}
    windows.add(scraper.clock(), results, stale_after)
    metrics.count(results)
    _log_changes(windows.cluster, before, windows.stale())


def _log_changes(cluster: ClusterKey, before: Set[str], after: Mapping[str, Miss]) -> None:
    name = "/".join(cluster)
    for pod, miss in after.items():
        if pod not in before:
            logger.warning(
                "worker stale cluster=%s pod=%s reason=%s: %s", name, pod, miss.reason, miss.message
            )
    for pod in sorted(before - after.keys()):
        logger.info("worker no longer stale cluster=%s pod=%s", name, pod)
