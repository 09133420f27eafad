"""Fingerprint of a reconcile that had nothing to write: with the same inputs, nothing is compared
again, and where nothing was left to do either, nothing is observed again.  Pure.
"""

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.observed.state import Problem
from pdcluster_api.plan.result import ClusterPlan

# Upper bound between full comparisons, in case the fingerprint misses an input
MAX_SECONDS = 3600.0


@dataclass(frozen=True)
class ObservedInputs:
    """All that an observation starts from."""

    change: int  # of the cache, in the PDCluster or its children (`Cache.change`)
    # what is known of its etcd (`EtcdView.standing`); None = that depends on the time
    etcd: tuple[object, ...] | None
    faults: Mapping[str, Problem]  # by StatefulSet, the problem that keeps it from getting pods
    key_secret: str | None  # Secret of the API keys, None = none is named


@dataclass(frozen=True)
class Fingerprint:
    """Inputs of a reconcile that had nothing to write."""

    children: bytes  # digest of the plan and of all children
    until: datetime  # when they are compared again in any case
    is_due: bool  # at that time something falls due, as the renewal of a certificate does
    observed: ObservedInputs | None = None  # None = something was left to do
    observed_until: datetime | None = None  # when it is observed again

    @classmethod
    def of(
        cls, live: Live, plan: ClusterPlan, now: datetime, seconds: float | None
    ) -> "Fingerprint":
        """seconds: until something falls due; None = no sooner than the resync"""
        # not all PDClusters at once
        longest = MAX_SECONDS * (0.5 + 0.5 * zlib.crc32(live.uid.encode()) / 2**32)
        left = longest if seconds is None else min(seconds, longest)
        return cls(digest_of(live, plan), now + timedelta(seconds=left), is_due=left == seconds)

    def holds(self, children: bytes, now: datetime) -> bool:
        return now < self.until and children == self.children

    def requeue_after_seconds(self, now: datetime) -> float | None:
        """None = no sooner than the resync."""
        return max(0.0, (self.until - now).total_seconds()) if self.is_due else None

    def at_rest(
        self, observed: ObservedInputs, seconds: float | None, now: datetime
    ) -> "Fingerprint":
        """The same after nothing was left to do, for as long as that holds.  seconds: until
        something falls due; None = nothing does
        """
        due = self.until if seconds is None else now + timedelta(seconds=seconds)
        return replace(self, observed=observed, observed_until=min(self.until, due))

    def rest_seconds(self, now: datetime) -> float:
        """Seconds until it is to be observed again; 0 = now."""
        until = self.observed_until or now
        return max(0.0, (until - now).total_seconds())


def digest_of(live: Live, plan: ClusterPlan) -> bytes:
    """Digest of all that the children of a PDCluster follow from, but the time."""
    metadata = live.body["metadata"]
    versions = sorted(
        (child["metadata"]["uid"], child["metadata"].get("resourceVersion"))
        for child in live.children
    )
    parts = (
        live.uid,
        metadata.get("generation"),
        sorted((metadata.get("annotations") or {}).items()),
        sorted(plan.commands),
        replace(plan, commands=frozenset()),
        versions,
    )
    return hashlib.sha256(repr(parts).encode()).digest()
