"""Terminating pods, and those of lost nodes. Pure. One that is there a while after its grace period
is lost: a user has to say that the node is off.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from pdcluster_api.plan.observed.state import EndingPod, Observed, Problem
from pdcluster_schema.conditions import NODE_LOST

ENDING_SECONDS = 60.0  # Time beyond its grace period in which a pod ends, as it is killed then


@dataclass(frozen=True)
class Ending:
    """Terminating pods of a cluster, those of its etcd among them."""

    # names of those that should have been gone for `ENDING_SECONDS`
    lost: frozenset[str] = frozenset()
    next_seconds: float | None = None  # until another one is lost; None = none can be


def ending_of(observed: Observed, now: str | None) -> Ending:
    """Look at every pod that ends.  now: RFC 3339; None = none is known as lost"""
    if now is None:
        return Ending()
    workers = (pod for state in observed.workloads for pod in state.pods if pod.terminating)
    pods = (*(pod.ending for pod in workers), *observed.discovery.ending)
    lefts = {pod.name: _seconds_left(pod.since, now) for pod in pods if pod.since is not None}
    return Ending(
        frozenset(name for name, left in lefts.items() if left <= 0),
        min((left for left in lefts.values() if left > 0), default=None),
    )


def node_lost(pods: Iterable[EndingPod]) -> Problem | None:
    """Problem of lost pods, the way out included; None = there is none."""
    found = sorted(pods, key=lambda pod: pod.name)
    if not found:
        return None
    first, others = found[0], found[1:]
    delete = f"`kubectl delete pod {first.name} --force`"
    taint = f"kubectl taint node {first.node} node.kubernetes.io/out-of-service=nodeshutdown"
    fix = f"`{taint}:NoExecute`, or {delete}" if first.node else delete
    more = f" (and {len(others)} more)" if others else ""
    return Problem(
        NODE_LOST,
        f"{first}{more} should have ended and has not: its node is lost, or cannot end it; once "
        f"the node is certainly off, {fix}",
    )


def _seconds_left(since: str, now: str) -> float:
    late = datetime.fromisoformat(now) - datetime.fromisoformat(since)
    return ENDING_SECONDS - late.total_seconds()
