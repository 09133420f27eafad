"""Latencies of a role beside their objectives, and what they would be with another load per worker.

    predicted(x) = f * (service * x^b + queue * x * (1 - u) / (1 - u * x))

x is the load per worker over the present one: N / n where n of N workers stay. The queue's share
grows as waits in a queue do, without bound where the utilization u * x comes to 1. b is 1 for the
time between tokens, whose steps take x times as long at most with x times the streams, else 0. f is
what was measured over what was predicted at earlier changes of size. Fewer workers are never
expected to be faster.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.rules import (
    CORRECTION_LIMIT,
    CORRECTION_WEIGHT,
    LEAST_ABOVE,
    LEAST_SAMPLES,
)
from pdcluster_api.plan.observed.state import DecisionInput
from pdcluster_schema.autoscale import LatencyObjectiveSpec

NAMES: Mapping[str, str] = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "queue": "queue_seconds",
}
"""Names in a decision, by the field of `autoscale.objective`."""

_SHOWN = (50, 90, 99)
_LEAST_MORE_LOAD = 1.05  # of a worker: below it a prediction says nothing


@dataclass(frozen=True)
class MeasuredLatency:
    """A latency that has an objective.

    observed:    of the workers that answer HTTP, while the role had its present workers
    queue:       the part of `seconds` that is spent in a queue
    utilization: of the role's workers, 0 to 1
    factor:      observed over predicted, of earlier changes of size
    """

    kind: str
    objective: LatencyObjectiveSpec
    observed: LatencyHistogram
    queue: float = 0.0
    utilization: float = 0.0
    factor: float = 1.0

    @property
    def name(self) -> str:
        percentile = self.objective.percentile
        return NAMES[self.kind] + ("" if percentile is None else f"_p{percentile}")

    @property
    def least_samples(self) -> int:
        """So many that some are above the percentile; a mean has no tail that one would miss."""
        return least_samples(self.objective.percentile)

    @property
    def is_thin(self) -> bool:
        """There are samples, and too few to say, or in no buckets that all workers have."""
        return self.observed.count > 0.0 and self.seconds is None

    @property
    def seconds(self) -> float | None:
        """The percentile, or the mean where none is given; None = it cannot be said."""
        if self.observed.count < self.least_samples:
            return None
        return at_percentile(self.observed, self.objective.percentile)

    def predicted(self, load: float) -> float:
        """Seconds at so many times the present load per worker, from 1 on; 0 without samples."""
        seconds, used = self.seconds or 0.0, self.utilization
        if load <= 1.0:
            return seconds
        service, queue = seconds - self.queue, self.queue
        if self.kind == "itl":
            service *= load
        if queue > 0.0:
            if used * load >= 1.0:
                return math.inf
            queue *= load * (1.0 - used) / (1.0 - used * load)
        return max(seconds, self.factor * (service + queue))

    def inputs(self, role: str) -> Iterator[DecisionInput]:
        """Its percentiles, where it has samples, and the correction."""
        for percentile in _SHOWN:
            name, value = f"{NAMES[self.kind]}_p{percentile}", self.observed.percentile(percentile)
            if percentile != self.objective.percentile and value is not None:
                yield DecisionInput(role, name, round(value, 4))
        yield DecisionInput(role, f"{NAMES[self.kind]}_samples", round(self.observed.count, 1))
        if self.factor != 1.0:
            name = f"{NAMES[self.kind]}_correction_ratio"
            yield DecisionInput(role, name, round(self.factor, 4))


def at_percentile(histogram: LatencyHistogram, percentile: int | None) -> float | None:
    return histogram.mean if percentile is None else histogram.percentile(percentile)


def least_samples(percentile: int | None) -> int:
    if percentile is None:
        return 1
    return max(LEAST_SAMPLES, math.ceil(LEAST_ABOVE * 100 / (100 - percentile)))


@dataclass(frozen=True)
class Correction:
    """before: the last that was measured with `workers` workers, not corrected."""

    workers: int
    before: MeasuredLatency
    factor: float = 1.0


def learned(
    past: Correction | None, now: MeasuredLatency, workers: int, num_settled: int
) -> Correction | None:
    """Learn from a role's predictions: after each change of size with which the load per
    worker grew, once the workers have had their part of it.
    """
    if past is not None and past.before.objective != now.objective:
        past = None
    if now.seconds is None or num_settled < workers:
        return past
    if past is None:
        return Correction(workers, now)
    if past.workers == workers:
        return replace(past, before=now)
    factor, used = past.factor, past.before.utilization
    load = now.utilization / used if used > 0.0 else 1.0
    expected = past.before.predicted(load) if load >= _LEAST_MORE_LOAD else math.inf
    if 0.0 < expected < math.inf:
        least, most = 1.0 / CORRECTION_LIMIT, CORRECTION_LIMIT
        newest = min(most, max(least, now.seconds / expected))
        factor += CORRECTION_WEIGHT * (newest - factor)
    return Correction(workers, now, factor)
