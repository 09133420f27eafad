"""A PDCluster on which nothing was to be written: the same inputs need no second comparison.

Rendering every child and comparing it with what there is takes most of a reconcile, and
most reconciles find the same as the one before.  Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.result import ClusterPlan

MAX_SECONDS = 300.0
"""Longest time without a comparison: the period in which every PDCluster is enqueued anyway."""


@dataclass(frozen=True)
class Inputs:
    """All that the children of a PDCluster follow from, but the time.

    plan:     without its status, which is written apart
    versions: resourceVersion of each child, by uid
    """

    plan: ClusterPlan
    uid: str
    generation: int
    annotations: Mapping[str, str]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, live: Live, plan: ClusterPlan) -> "Inputs":
        """The inputs of one reconcile."""
        metadata = live.body["metadata"]
        bare = replace(plan, status={}, events=(), requeue_after_seconds=None)
        versions = {str(child["metadata"]["uid"]): _version(child) for child in live.children}
        return cls(
            bare,
            live.uid,
            metadata.get("generation", 0),
            metadata.get("annotations") or {},
            versions,
        )


@dataclass(frozen=True)
class Settled:
    """Inputs with which nothing was to be written.

    until:    when they are compared again in any case
    is_known: at that time something falls due, as the renewal of a certificate does
    """

    inputs: Inputs
    until: datetime
    is_known: bool

    def holds(self, inputs: Inputs, now: datetime) -> bool:
        """Return whether a reconcile with these inputs writes nothing either."""
        return now < self.until and inputs == self.inputs

    def requeue_after_seconds(self, now: datetime) -> float | None:
        """Seconds until something falls due; None = no sooner than the resync."""
        return max(0.0, (self.until - now).total_seconds()) if self.is_known else None


def settled(inputs: Inputs, now: datetime, requeue_after_seconds: float | None) -> Settled:
    """State of a PDCluster after a reconcile that wrote nothing.

    requeue_after_seconds: until something falls due; None = no sooner than the resync
    """
    seconds = (
        MAX_SECONDS if requeue_after_seconds is None else min(requeue_after_seconds, MAX_SECONDS)
    )
    return Settled(
        inputs, now + timedelta(seconds=seconds), is_known=seconds == requeue_after_seconds
    )


def _version(child: Mapping[str, Any]) -> str:
    return str(child["metadata"].get("resourceVersion", ""))
