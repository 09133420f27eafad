"""Results and cost of the scrapes, read from the windows when the registry is collected. Of a
draining worker only its part of the prefill queue counts, as for the autoscaler.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdcluster_api.plan.autoscale.values import WorkerSample
from pdcluster_operator.scrape.values import ClusterKey, Miss, ScrapeResult
from pdcluster_operator.scrape.windows import Windows

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
        ages, workers, numbers = _families()
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
                    _add(family, labels, name, sample.workers if name in _OF_ALL else staying)
        yield ages
        yield workers
        yield from numbers.values()


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily, dict[str, GaugeMetricFamily]]:
    ages = GaugeMetricFamily(
        f"{_PREFIX}sample_age_seconds",
        "Time since a worker of the pool that stays gave good numbers.",
        labels=_POOL,
    )
    text = (
        "Ready workers of the pool that stay: fresh ones count, stale ones have missed too many "
        "scrapes."
    )
    workers = GaugeMetricFamily(f"{_PREFIX}scraped_workers", text, labels=(*_POOL, "state"))
    numbers = {
        name: GaugeMetricFamily(_PREFIX + name, text, labels=_POOL)
        for name, (_, text) in _NUMBERS.items()
    }
    return ages, workers, numbers


def _add(
    family: GaugeMetricFamily, labels: Sequence[str], name: str, workers: Sequence[WorkerSample]
) -> None:
    """Add a number of a pool; none where it has no fresh worker: 0 would mean idle."""
    over, _ = _NUMBERS[name]
    if workers:
        family.add_metric(labels, over([getattr(worker, name) for worker in workers]))
