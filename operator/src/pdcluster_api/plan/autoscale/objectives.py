"""Latencies of a role, read from the rounds of its pools and of those that answer HTTP. Buckets are
added over workers and rounds, and only then a percentile is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram, merged
from pdcluster_api.plan.autoscale.latency import MeasuredLatency, at_percentile, least_samples
from pdcluster_api.plan.autoscale.totals import Totals
from pdcluster_api.plan.autoscale.values import PoolSample
from pdcluster_schema.autoscale import AutoscaleSpec, LatencyObjectiveSpec

Rounds = Sequence[PoolSample]
ItemT = TypeVar("ItemT")

_MOST_UNQUEUED = 0.05  # share of requests whose time in the queue may be unknown


def objectives_of(role: str, spec: AutoscaleSpec) -> Mapping[str, LatencyObjectiveSpec]:
    """Objectives of a role, by their fields in `autoscale.objective`."""
    objective = spec.objective
    prefill = {
        "ttft": objective.ttft or _mean_below(spec.prefill.ttft_seconds),
        "queue": objective.queue,
    }
    decode = {"itl": objective.itl or _mean_below(spec.decode.tpot_seconds)}
    found = {"prefill": prefill, "decode": decode, "mixed": prefill | decode}[role]
    return {kind: each for kind, each in found.items() if each is not None}


def _mean_below(seconds: float | None) -> LatencyObjectiveSpec | None:
    return None if seconds is None else LatencyObjectiveSpec(seconds=seconds)


def latencies_of(
    role: str,
    spec: AutoscaleSpec,
    windows: tuple[Sequence[Rounds], Sequence[Rounds]],
    own: Totals,
    fresh_since: float,
) -> tuple[MeasuredLatency, ...]:
    """Latencies by which a role is judged.

    windows:     of the role's pools, and of those that answer HTTP
    fresh_since: rounds from then on count whatever size the role had
    """
    found = []
    for kind, objective in objectives_of(role, spec).items():
        least = least_samples(objective.percentile)
        observed = _observed(windows, kind, least, fresh_since)
        queue, used = 0.0, _utilization(role, own)
        if kind != "itl":
            waits = _observed(windows, "queue", observed.count, fresh_since)
            queue = _queue_part(observed, waits, objective.percentile)
        found.append(MeasuredLatency(kind, objective, observed, queue, used))
    return tuple(found)


def _queue_part(
    observed: LatencyHistogram, waits: LatencyHistogram, percentile: int | None
) -> float:
    """Return all of it where the engine does not say how long most requests waited."""
    seconds = at_percentile(observed, percentile) or 0.0
    if waits.count < (1.0 - _MOST_UNQUEUED) * observed.count:
        return seconds
    return min(seconds, at_percentile(waits, percentile) or 0.0)


def _utilization(role: str, own: Totals) -> float:
    """Use that of the KV cache for a mixed worker: its engine is never without a step."""
    total = own.utilization if role == "prefill" else own.kv_cache_usage
    return min(1.0, total / own.workers) if own.workers else 0.0


def _observed(
    windows: tuple[Sequence[Rounds], Sequence[Rounds]], kind: str, least: float, fresh_since: float
) -> LatencyHistogram:
    """The fresh rounds, and while these have some samples but too few, those before in which the
    role had the same workers.
    """
    own, ingress = windows
    workers = _by_time(own, lambda sample: [worker.pod for worker in sample.workers])
    latencies = _by_time(
        ingress, lambda sample: [sample.latencies[kind]] if kind in sample.latencies else []
    )
    newest = max(workers, default=0.0)
    found: list[LatencyHistogram] = []
    count = 0.0
    for at in sorted(latencies, reverse=True):
        is_same = workers.get(at) == workers.get(newest)
        if at < fresh_since and (not 0.0 < count < least or not is_same):
            break
        found += latencies[at]
        count += sum(each.count for each in latencies[at])
    return merged(found)


def _by_time(
    windows: Sequence[Rounds], read: Callable[[PoolSample], list[ItemT]]
) -> dict[float, list[ItemT]]:
    """Join the rounds of several pools by their times: a cluster's are scraped together."""
    found: dict[float, list[ItemT]] = {}
    for rounds in windows:
        for sample in rounds:
            found.setdefault(sample.at, []).extend(read(sample))
    return found
