"""Results of a simulation: each request's times, gaps between tokens, and the cluster over time."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

import numpy as np

from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_simulator.requests import RequestOutcome, SimulatedRequest
from pdcluster_simulator.workers import ClusterWorker

_BUCKETS = 200.0  # of gaps, in a factor of e: half a per cent each


class Gaps:
    """Seconds between tokens: their sum, and how many there are of each length, within half a per
    cent.
    """

    def __init__(self) -> None:
        self.number = 0
        self.seconds = 0.0
        self.counts: Counter[int] = Counter()

    def add(self, seconds: float, number: int) -> None:
        self.number += number
        self.seconds += seconds * number
        self.counts[round(log(max(seconds, 1e-9)) * _BUCKETS)] += number

    def merge(self, other: "Gaps") -> None:
        self.number += other.number
        self.seconds += other.seconds
        self.counts.update(other.counts)

    def copy(self) -> "Gaps":
        found = Gaps()
        found.merge(self)
        return found

    def since(self, before: "Gaps") -> "Gaps":
        found = Gaps()
        found.number, found.seconds = self.number - before.number, self.seconds - before.seconds
        found.counts = self.counts - before.counts
        return found

    @property
    def mean(self) -> float | None:
        return self.seconds / self.number if self.number else None

    def percentile(self, percent: float) -> float | None:
        """As numpy's, without a line between two values."""
        left = percent / 100.0 * self.number
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0.0 and self.counts[bucket]:
                return exp(bucket / _BUCKETS)
        return None


class PoolLatencies:
    """Observations of one pool since the autoscaler last looked, by its buckets."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.counts = {
            name: [0.0] * (len(LATENCY_BUCKETS) + 1) for name in ("ttft", "itl", "queue")
        }
        self.seconds = dict.fromkeys(self.counts, 0.0)

    def add(self, name: str, seconds: float, number: int = 1) -> None:
        self.counts[name][bisect_left(LATENCY_BUCKETS, seconds)] += number
        self.seconds[name] += number * seconds


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """The cluster at one time.

    queued:   requests that wait for a credit or for an engine, by the role of their worker
    replicas, ready: workers of each pool; accelerators: those that pods hold, by type
    """

    seconds: float
    queued: Mapping[str, int]
    running: int
    kv_usage: Mapping[str, float]
    busy: Mapping[str, float]
    replicas: Mapping[str, int]
    ready: Mapping[str, int]
    draining: Mapping[str, int]
    accelerators: Mapping[str, int]


_COLUMNS = ("arrivals", "ttft", "end", "tpot", "prompt_tokens", "output_tokens", "remote")
_TIMES = ("arrivals", "end")


@dataclass(frozen=True, slots=True)
class Mark:
    """Length of a recorder at one time, and its counts."""

    num_rows: int
    gaps: Gaps
    outcomes: Counter[str]
    refusals: Counter[str]


@dataclass
class Recorder:
    """Columns have a row for each request that has ended.  ttft < 0: refused or cut

    repeated: seconds of the trace that were repeated, not simulated
    """

    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    end: "array[float]" = field(default_factory=lambda: array("d"))
    tpot: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    remote: "array[int]" = field(default_factory=lambda: array("b"))
    gaps: Gaps = field(default_factory=Gaps)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    samples: list[ClusterSample] = field(default_factory=list)
    num_arrived: int = 0
    num_preemptions: int = 0
    repeated: float = 0.0
    by_pool: dict[tuple[str, str], PoolLatencies] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return self.num_arrived - len(self.end)

    def on_first(
        self, request: SimulatedRequest, worker: ClusterWorker, queue_seconds: float
    ) -> None:
        if (latencies := self.by_pool.get(worker.pool)) is not None:
            latencies.add("ttft", request.first - request.arrival)
            latencies.add("queue", queue_seconds)

    def on_gaps(self, worker: ClusterWorker, seconds: float, number: int) -> None:
        if number <= 0:
            return
        self.gaps.add(seconds, number)
        if (latencies := self.by_pool.get(worker.pool)) is not None:
            latencies.add("itl", seconds, number)

    def on_end(self, request: SimulatedRequest, worker: ClusterWorker | None) -> None:
        self.outcomes[request.outcome.value] += 1
        if request.refusal:
            self.refusals[request.refusal] += 1
        is_complete = request.outcome is RequestOutcome.COMPLETE
        number = request.output_tokens
        self.arrivals.append(request.arrival + self.repeated)
        self.ttft.append(request.first - request.arrival if is_complete else -1.0)
        self.end.append(request.end + self.repeated)
        more = number > 1 and is_complete
        self.tpot.append((request.end - request.first) / (number - 1) if more else -1.0)
        self.prompt_tokens.append(request.prompt_tokens)
        self.output_tokens.append(number if is_complete else 0)
        self.remote.append(is_complete and request.is_remote)

    def mark(self) -> Mark:
        return Mark(len(self.end), self.gaps.copy(), self.outcomes.copy(), self.refusals.copy())

    def repeat(self, begin: Mark, end: Mark, seconds: float) -> None:
        """Count what was recorded between two marks again, so many seconds later."""
        for name in _COLUMNS:
            column = getattr(self, name)
            rows = column[begin.num_rows : end.num_rows]
            column.extend([row + seconds for row in rows] if name in _TIMES else rows)
        self.num_arrived += end.num_rows - begin.num_rows
        self.gaps.merge(end.gaps.since(begin.gaps))
        self.outcomes.update(end.outcomes - begin.outcomes)
        self.refusals.update(end.refusals - begin.refusals)

    def merge(self, others: Iterable["Recorder"]) -> None:
        """Add the requests of other cells; their samples are summed, or averaged."""
        cells = [self, *others]
        for other in cells[1:]:
            for name in _COLUMNS:
                getattr(self, name).extend(getattr(other, name))
            self.gaps.merge(other.gaps)
            self.outcomes.update(other.outcomes)
            self.refusals.update(other.refusals)
            self.num_arrived += other.num_arrived
            self.num_preemptions += other.num_preemptions
        longest = max((cell.samples for cell in cells), key=len)
        rows = zip(*(_held(cell.samples, longest) for cell in cells if cell.samples), strict=True)
        self.samples = [_together(row) for row in rows]


def _held(
    samples: Sequence[ClusterSample], longest: Sequence[ClusterSample]
) -> list[ClusterSample]:
    """As many as the longest has: a cell keeps its workers at the end, which compute no more."""
    last = replace(samples[-1], busy=dict.fromkeys(samples[-1].busy, 0.0))
    later = longest[len(samples) :]
    return [*samples, *(replace(last, seconds=each.seconds) for each in later)]


def _together(samples: Sequence[ClusterSample]) -> ClusterSample:
    def added(name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for sample in samples:
            for key, value in getattr(sample, name).items():
                found[key] = found.get(key, 0) + value
        return found

    def averaged(name: str) -> dict[str, float]:
        number = len(samples)
        return {key: value / number for key, value in added(name).items()}

    return ClusterSample(
        samples[0].seconds,
        added("queued"),
        sum(sample.running for sample in samples),
        averaged("kv_usage"),
        averaged("busy"),
        *(added(name) for name in ("replicas", "ready", "draining", "accelerators")),
    )


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds; None = none was observed."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: "np.ndarray") -> "Latency":
        if not len(values):
            return cls(None, None, None, None)
        p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
        return cls(float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class SimulationSummary:
    """Figures of a whole simulation.  goodput: requests a second within both objectives"""

    seconds: float
    num_requests: int
    outcomes: Mapping[str, int]
    refusals: Mapping[str, int]
    requests_per_second: float
    goodput: float
    good_ratio: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    remote_ratio: float
    num_preemptions: int
    ttft: Latency
    tpot: Latency
    itl: Latency
    accelerator_hours: Mapping[str, float]


def summarize(
    recorder: Recorder, ttft_seconds: float, tpot_seconds: float | None
) -> SimulationSummary:
    """ttft_seconds, tpot_seconds: the objectives; None = any."""
    ttft, tpot = np.array(recorder.ttft), np.array(recorder.tpot)
    ends, arrivals = np.array(recorder.end), np.array(recorder.arrivals)
    complete = ttft >= 0.0
    seconds = float(ends.max() - arrivals.min()) if len(ends) else 0.0
    good = _is_good(ttft, tpot, ttft_seconds, tpot_seconds)
    gaps, number = recorder.gaps, max(1, recorder.num_arrived)
    outcomes = dict(recorder.outcomes)
    if recorder.num_running > 0:
        outcomes["unfinished"] = recorder.num_running
    per_second = 1.0 / seconds if seconds else 0.0
    return SimulationSummary(
        seconds=seconds,
        num_requests=recorder.num_arrived,
        outcomes=outcomes,
        refusals=dict(recorder.refusals),
        requests_per_second=float(complete.sum()) * per_second,
        goodput=float(good.sum()) * per_second,
        good_ratio=float(good.sum()) / number,
        output_tokens_per_second=float(sum(recorder.output_tokens)) * per_second,
        prompt_tokens_per_second=float(sum(recorder.prompt_tokens)) * per_second,
        remote_ratio=sum(recorder.remote) / max(1, int(complete.sum())),
        num_preemptions=recorder.num_preemptions,
        ttft=Latency.of(ttft[complete]),
        tpot=Latency.of(tpot[tpot >= 0.0]),
        itl=Latency(gaps.mean, *(gaps.percentile(percent) for percent in (50, 90, 99))),
        accelerator_hours=_accelerator_hours(recorder.samples),
    )


def _is_good(
    ttft: "np.ndarray", tpot: "np.ndarray", ttft_seconds: float, tpot_seconds: float | None
) -> "np.ndarray":
    """An answer of one token has no time between tokens."""
    good: np.ndarray = (ttft >= 0.0) & (ttft <= ttft_seconds)
    return good if tpot_seconds is None else good & (tpot <= tpot_seconds)


def _accelerator_hours(samples: Sequence[ClusterSample]) -> dict[str, float]:
    if len(samples) < 2:
        return {}
    hours = (samples[1].seconds - samples[0].seconds) / 3600.0
    found: Counter[str] = Counter()
    for sample in samples:
        found.update(sample.accelerators)
    return {gpu: number * hours for gpu, number in found.items()}


@dataclass(frozen=True, slots=True)
class IntervalFigures:
    """One interval, by when its requests ended; latencies None = none did."""

    seconds: float
    arrived: float
    completed: float
    good: float
    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p90: float | None


def over_time(
    recorder: Recorder, interval: float, ttft_seconds: float, tpot_seconds: float | None
) -> list[IntervalFigures]:
    """Rates per second."""
    ends, arrivals = np.array(recorder.end), np.array(recorder.arrivals)
    if not len(ends):
        return []
    ttft, tpot = np.array(recorder.ttft), np.array(recorder.tpot)
    good = _is_good(ttft, tpot, ttft_seconds, tpot_seconds)
    number = int(ends.max() // interval) + 1
    at = np.minimum((ends // interval).astype(int), number - 1)
    arrived = np.bincount(
        np.minimum((arrivals // interval).astype(int), number - 1), minlength=number
    )
    order = np.argsort(at, kind="stable")
    bounds = np.searchsorted(at[order], np.arange(number + 1))
    moments = []
    for index in range(number):
        rows = order[bounds[index] : bounds[index + 1]]
        complete = rows[ttft[rows] >= 0.0]
        first, gaps = Latency.of(ttft[complete]), Latency.of(tpot[rows][tpot[rows] >= 0.0])
        moments.append(
            IntervalFigures(
                index * interval,
                float(arrived[index]) / interval,
                len(complete) / interval,
                float(good[rows].sum()) / interval,
                first.p50,
                first.p90,
                gaps.p90,
            )
        )
    return moments
