"""Latencies of a new revision beside the old one's, of the workers that answer, since the gate of a
roll out bakes, however many rounds that takes. Buckets are added, and only then a percentile is
taken, as for a role.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram, merged
from pdcluster_api.plan.autoscale.latency import MeasuredLatency
from pdcluster_api.plan.autoscale.objectives import objectives_of
from pdcluster_api.plan.autoscale.values import PoolSample
from pdcluster_api.plan.observed.state import Attainment, RevisionLatency
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.workload import PoolKey

_SINCE_REQUEST = ("ttft", "itl")  # what a client sees; the queue is a part of the first


@dataclass(frozen=True)
class GateTotals:
    """All rounds of one gate, added up by workload and kind of latency.  Rounds are kept for
    minutes, and a gate may wait for days.
    """

    since: float  # of that clock by which rounds end
    until: float = float("-inf")  # end of the newest round in it
    by_workload: Mapping[str, Mapping[str, LatencyHistogram]] = field(default_factory=dict)

    def with_rounds(self, windows: Mapping[PoolKey, Sequence[PoolSample]]) -> "GateTotals":
        """With the rounds that have ended since, of those that began at the gate or later."""
        found = {name: dict(latencies) for name, latencies in self.by_workload.items()}
        rounds = [
            sample
            for (role, _), window in windows.items()
            if role != "prefill"
            for sample in _begun(window, self.since)
            if sample.at > self.until
        ]
        for sample in rounds:
            for name, latencies in sample.by_workload.items():
                own = found.setdefault(name, {})
                for kind, more in latencies.items():
                    own[kind] = merged([own[kind], more]) if kind in own else more
        until = max((sample.at for sample in rounds), default=self.until)
        return replace(self, until=until, by_workload=found)

    def observed(self, kind: str, names: Collection[str], *, is_in: bool) -> LatencyHistogram:
        """Histogram of the workloads of these names, or of all others."""
        return merged(
            latencies[kind]
            for name, latencies in self.by_workload.items()
            if (name in names) == is_in and kind in latencies
        )


def attainment(
    spec: AutoscaleSpec, new: Collection[str], totals: GateTotals, counted_since: str = ""
) -> Attainment:
    """new: names of the new revision's workloads"""
    found = []
    for kind, objective in objectives_of("mixed", spec).items():
        if kind in _SINCE_REQUEST:
            of_new, of_old = (
                MeasuredLatency(kind, objective, totals.observed(kind, new, is_in=is_in))
                for is_in in (True, False)
            )
            seconds = of_new.seconds, of_old.seconds
            found.append(RevisionLatency(of_new.name, objective.seconds, *seconds))
    number = int(totals.observed("ttft", new, is_in=True).count)
    return Attainment(number, tuple(found), counted_since)


def first_round(windows: Mapping[PoolKey, Sequence[PoolSample]]) -> float | None:
    """End of the oldest round that is known of workers that answer."""
    ends = (window[0].at for (role, _), window in windows.items() if role != "prefill" and window)
    return min(ends, default=None)


def _begun(window: Sequence[PoolSample], since: float) -> Iterator[PoolSample]:
    """Rounds that began then or later: what one counts has come since the one before it."""
    for before, sample in pairwise(window):
        if before.at >= since:
            yield sample
