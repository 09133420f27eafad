"""Latencies of a new revision beside the old one's, of the workers that answer, in the rounds of a
time. Buckets are added, and only then a percentile is taken, as for a role.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram, merged
from pdcluster_api.plan.autoscale.latency import MeasuredLatency
from pdcluster_api.plan.autoscale.objectives import objectives_of
from pdcluster_api.plan.autoscale.values import PoolSample
from pdcluster_api.plan.observed.state import Attainment, RevisionLatency
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.workload import PoolKey

_SINCE_REQUEST = ("ttft", "itl")  # what a client sees; the queue is a part of the first


def attainment(
    spec: AutoscaleSpec,
    new: Collection[str],
    windows: Mapping[PoolKey, Sequence[PoolSample]],
    since: float,
) -> Attainment:
    """new: names of the new revision's workloads; since: of that clock by which rounds ended"""
    rounds = [
        sample.by_workload
        for (role, _), window in windows.items()
        if role != "prefill"
        for sample in _begun(window, since)
    ]

    def observed(kind: str, *, is_new: bool) -> LatencyHistogram:
        return merged(
            latencies[kind]
            for by_workload in rounds
            for name, latencies in by_workload.items()
            if (name in new) == is_new and kind in latencies
        )

    found = []
    for kind, objective in objectives_of("mixed", spec).items():
        if kind in _SINCE_REQUEST:
            of_new, of_old = (
                MeasuredLatency(kind, objective, observed(kind, is_new=is_new))
                for is_new in (True, False)
            )
            seconds = of_new.seconds, of_old.seconds
            found.append(RevisionLatency(of_new.name, objective.seconds, *seconds))
    return Attainment(int(observed("ttft", is_new=True).count), tuple(found))


def _begun(window: Sequence[PoolSample], since: float) -> Iterator[PoolSample]:
    """Rounds that began then or later: what one counts has come since the one before it."""
    for before, sample in pairwise(window):
        if before.at >= since:
            yield sample
