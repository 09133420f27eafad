"""A PDCluster at rest: its last reconcile wrote nothing, and all that it started from is as it was.

Most reconciles are enqueued by a resync, or to look once more why a pod does not come, and find
nothing new.  One of a PDCluster at rest asks for that reason alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pdcluster_api.plan.observed.problem import Problem


@dataclass(frozen=True)
class Unchanged:
    """Facts of a reconcile after which there was nothing to do.

    change: of the cache, in the PDCluster or its children (`Cache.change`)
    etcd:   what is known of its etcd (`EtcdView.standing`)
    faults: by StatefulSet, the problem that keeps it from getting pods
    key_secret: Secret of the API keys, which had no fault; None = none is named
    until:  when something falls due
    """

    change: int
    etcd: tuple[object, ...]
    faults: Mapping[str, Problem]
    key_secret: str | None
    until: datetime

    def holds(self, change: int, etcd: tuple[object, ...] | None, now: datetime) -> bool:
        """Return whether a reconcile would start from the same, its faults aside."""
        return (self.change, self.etcd) == (change, etcd) and now < self.until

    def due_within(self, seconds: float | None, now: datetime) -> "Unchanged":
        """The same, until something falls due in so many seconds; None = nothing does."""
        if seconds is None:
            return self
        return replace(self, until=min(self.until, now + timedelta(seconds=seconds)))

    def seconds_left(self, now: datetime) -> float:
        """Seconds until something falls due."""
        return max(0.0, (self.until - now).total_seconds())
