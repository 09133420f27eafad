"""Results of the last scrapes, for each pool of a cluster. Pure. A worker that misses a scrape
keeps its last numbers until it is stale; a restart, or another address, begins its rates again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram, merged
from pdcluster_api.plan.autoscale.rules import MAX_ROUNDS
from pdcluster_api.plan.autoscale.values import PoolSample, WorkerSample
from pdcluster_operator.scrape.page import (
    METRICS,
    ClusterKey,
    MetricsPage,
    Miss,
    ScrapeResult,
    ScrapeTarget,
)
from pdcluster_schema.workload import PoolKey

_GAUGES = [name for name, metric in METRICS.items() if metric.kind == "gauge"]
_COUNTERS = [name for name, metric in METRICS.items() if metric.kind == "counter"]


def worker_sample(pod: str, now: MetricsPage, before: MetricsPage | None) -> WorkerSample:
    """Sample of the worker at `now`; rates and means since `before`, None = there is none."""
    gauges = {name: getattr(now, name) for name in _GAUGES}
    if before is None or not _is_same_process(now, before):
        return WorkerSample(pod, **gauges)
    grown = {name: getattr(now, name) - getattr(before, name) for name in _COUNTERS}
    seconds = now.at - before.at
    return WorkerSample(
        pod,
        **gauges,
        request_rate=grown["time_to_first_token_seconds_count"] / seconds,
        prompt_token_rate=grown["prompt_tokens_total"] / seconds,
        prefill_token_rate=grown["prefill_tokens_total"] / seconds,
        prefill_busy_rate=grown["prefill_seconds_total"] / seconds,
    )


def latencies_since(now: MetricsPage, before: MetricsPage | None) -> Mapping[str, LatencyHistogram]:
    """Return what the worker has observed since `before`, by the names of `HISTOGRAMS`."""
    if before is None or not _is_same_process(now, before):
        return {}
    found = {
        name: histogram.since(before.histograms.get(name, LatencyHistogram.empty(histogram.bounds)))
        for name, histogram in now.histograms.items()
    }
    return {name: histogram for name, histogram in found.items() if histogram is not None}


def _is_same_process(now: MetricsPage, before: MetricsPage) -> bool:
    if now.at <= before.at or now.prompt_tokens_created != before.prompt_tokens_created:
        return False
    return all(getattr(now, name) >= getattr(before, name) for name in _COUNTERS)


@dataclass
class _WorkerWindow:
    address: str
    workload: str = ""
    page: MetricsPage | None = None
    sample: WorkerSample | None = None
    # since the page before; a round without an answer has none
    latencies: Mapping[str, LatencyHistogram] = field(default_factory=dict)
    num_misses: int = 0  # in a row, up to now
    miss: Miss | None = None  # the newest of them
    is_stale: bool = False

    def take(self, result: ScrapeResult, stale_after: int) -> None:
        if isinstance(result.result, Miss):
            self._count(result.result, stale_after)
            return
        now = replace(result.result, at=result.at)
        self.latencies = latencies_since(now, self.page)
        self.sample = worker_sample(result.target.pod, now, self.page)
        self.page, self.num_misses, self.miss, self.is_stale = now, 0, None, False

    def _count(self, miss: Miss, stale_after: int) -> None:
        self.num_misses += 1
        self.miss, self.latencies = miss, {}
        self.is_stale = self.num_misses > stale_after
        if self.is_stale:  # a mean over the whole gap would pass for a rate of now
            self.page = self.sample = None


@dataclass
class Windows:
    cluster: ClusterKey
    # by role, pool and pod
    _workers: dict[tuple[str, str, str], _WorkerWindow] = field(default_factory=dict)
    # of each pool, the oldest first
    _rounds: dict[PoolKey, deque[PoolSample]] = field(default_factory=dict)
    _leaving: frozenset[str] = frozenset()  # pods that drain

    def add(self, at: float, results: Sequence[ScrapeResult], stale_after: int) -> None:
        """Add one round: an answer for each ready worker of the cluster, and none of others.

        at:          when the round ended; not before that of the round before
        stale_after: misses in a row that a worker may have and still count with its last numbers
        """
        workers: dict[tuple[str, str, str], _WorkerWindow] = {}
        for result in sorted(results, key=lambda result: _place(result.target)):
            worker = self._workers.get(_place(result.target))
            if worker is None or worker.address != result.target.address:
                worker = _WorkerWindow(result.target.address, result.target.workload)
            worker.take(result, stale_after)
            workers[_place(result.target)] = worker
        self._workers = workers
        self._add_samples(at)

    def leave(self, pods: Collection[str]) -> None:
        """Note that exactly these pods drain: only their part of the queue is exported."""
        self._leaving = frozenset(pods)

    def pools(self) -> dict[PoolKey, tuple[PoolSample, ...]]:
        return {pool: tuple(rounds) for pool, rounds in self._rounds.items()}

    def stale(self) -> dict[str, Miss]:
        return {
            pod: worker.miss
            for (_, _, pod), worker in self._workers.items()
            if worker.is_stale and worker.miss is not None
        }

    @property
    def leaving(self) -> frozenset[str]:
        return self._leaving

    def newest(self) -> dict[PoolKey, PoolSample]:
        return {pool: rounds[-1] for pool, rounds in self._rounds.items()}

    def answered_at(self, pool: PoolKey) -> float | None:
        """Time when a worker of the pool that stays last gave good numbers; None = none has."""
        staying = [
            worker
            for place, worker in self._workers.items()
            if place[:2] == pool and place[2] not in self._leaving
        ]
        return max((worker.page.at for worker in staying if worker.page is not None), default=None)

    def _add_samples(self, at: float) -> None:
        pools = {place[:2] for place in self._workers}
        self._rounds = {pool: self._rounds.get(pool) or deque(maxlen=MAX_ROUNDS) for pool in pools}
        for pool, rounds in self._rounds.items():
            members = [
                (place[2], worker) for place, worker in self._workers.items() if place[:2] == pool
            ]
            fresh = tuple(worker.sample for _, worker in members if worker.sample is not None)
            stale = tuple(pod for pod, worker in members if worker.is_stale)
            parts: dict[str, list[Mapping[str, LatencyHistogram]]] = {}
            for _, worker in members:
                parts.setdefault(worker.workload, []).append(worker.latencies)
            by_workload = {name: _merged(each) for name, each in parts.items()}
            # of one workload both are the same object
            found = list(by_workload.values())
            latencies = found[0] if len(found) == 1 else _merged(found)
            rounds.append(PoolSample(at, fresh, stale, latencies, by_workload))


def _merged(latencies: Iterable[Mapping[str, LatencyHistogram]]) -> Mapping[str, LatencyHistogram]:
    parts: dict[str, list[LatencyHistogram]] = {}
    for each in latencies:
        for name, histogram in each.items():
            parts.setdefault(name, []).append(histogram)
    return {name: merged(each) for name, each in parts.items()}


def _place(target: ScrapeTarget) -> tuple[str, str, str]:
    return target.role, target.pool, target.pod
