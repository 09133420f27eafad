"""Results and cost of the scrapes, in the process's own registry.

Results are read from the windows when the registry is collected, on the event
loop's thread: a pool or cluster that is gone there is gone here.  Of a draining
worker only its part of the prefill queue counts, as for the autoscaler.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdcluster_api.plan.autoscale.values import WorkerSample
from pdcluster_operator.scrape.values import Answer, ClusterKey, Miss
from pdcluster_operator.scrape.windows import Seen, Windows

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_POOL = ("namespace", "pdcluster", "role", "pool")
_PREFIX = "pdcluster_operator_pool_"

# Field of WorkerSample -> (how the pool's workers make one number, help).
_NUMBERS: dict[str, tuple[Callable[[list[float]], float], str]] = {
    "prefill_queue_requests": (sum, "Requests of the prefill queue that the pool's workers hold, those that drain too."),
    "prefill_queue_tokens": (sum, "Tokens of the prefill queue that the pool's workers hold, those that drain too."),
    "num_requests_running": (sum, "Requests that run, over the pool's workers that stay."),
    "num_requests_waiting": (sum, "Requests that wait, over the pool's workers that stay."),
    "kv_cache_usage_ratio": (fmean, "Share of KV blocks that hold live tokens, mean of the pool's workers that stay."),
    "engine_busy_ratio": (fmean, "Share of time in an engine step, mean of the pool's workers that stay."),
}
_OF_ALL = ("prefill_queue_requests", "prefill_queue_tokens")


class ScrapeMetrics:
    """Counts every scrape, and shows what the windows of all clusters hold.

    windows: those that there are when the registry is collected
    clock:   that of the answers
    """

    def __init__(self, registry: CollectorRegistry, windows: Callable[[], Iterable[Windows]], clock: Callable[[], float]) -> None:
        self._seconds = Histogram(
            "pdcluster_operator_scrape_seconds", "Seconds of one scrape of one worker.", buckets=_BUCKETS, registry=registry
        )
        self._misses = Counter(
            "pdcluster_operator_scrape_misses",
            "Scrapes that gave no numbers, by reason.",
            ["namespace", "pdcluster", "reason"],
            registry=registry,
        )
        registry.register(_SeenCollector(windows, clock))

    def count(self, answers: Sequence[Answer]) -> None:
        """Count the answers of a round."""
        for answer in answers:
            self._seconds.observe(answer.seconds)
            if isinstance(answer.result, Miss):
                self._misses.labels(*answer.target.cluster, answer.result.reason.value).inc()

    def forget(self, cluster: ClusterKey) -> None:
        """Remove what is counted for a cluster."""
        self._misses.remove_by_labels({"namespace": cluster[0], "pdcluster": cluster[1]})


class _SeenCollector(Collector):
    def __init__(self, windows: Callable[[], Iterable[Windows]], clock: Callable[[], float]) -> None:
        self._windows = windows
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """A family for each number, a sample for each pool."""
        pools = [seen for windows in self._windows() for seen in windows.newest()]
        yield self._ages(pools)
        yield _workers(pools)
        for name in _NUMBERS:
            yield _numbers(name, pools)

    def _ages(self, pools: Sequence[Seen]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            f"{_PREFIX}sample_age_seconds", "Time since a worker of the pool that stays gave good numbers.", labels=_POOL
        )
        now = self._clock()
        for seen in pools:
            if seen.answered_at is not None:
                family.add_metric(_labels(seen), now - seen.answered_at)
        return family


def _workers(pools: Sequence[Seen]) -> GaugeMetricFamily:
    text = "Ready workers of the pool that stay: fresh ones count, stale ones have missed too many scrapes."
    family = GaugeMetricFamily(f"{_PREFIX}scraped_workers", text, labels=(*_POOL, "state"))
    for seen in pools:
        family.add_metric((*_labels(seen), "fresh"), len(_staying(seen)))
        family.add_metric((*_labels(seen), "stale"), sum(pod not in seen.leaving for pod in seen.sample.stale))
    return family


def _numbers(name: str, pools: Sequence[Seen]) -> GaugeMetricFamily:
    """One number for each pool that has a fresh worker; none where it is unknown: 0 would mean
    idle.
    """
    over, text = _NUMBERS[name]
    family = GaugeMetricFamily(_PREFIX + name, text, labels=_POOL)
    for seen in pools:
        workers = seen.sample.workers if name in _OF_ALL else _staying(seen)
        if workers:
            family.add_metric(_labels(seen), over([getattr(worker, name) for worker in workers]))
    return family


def _staying(seen: Seen) -> Sequence[WorkerSample]:
    return [worker for worker in seen.sample.workers if worker.pod not in seen.leaving]


def _labels(seen: Seen) -> tuple[str, str, str, str]:
    return *seen.cluster, *seen.pool
