"""A PDCluster on which nothing was to be written: the same inputs need no second comparison.

Rendering every child and comparing it with what there is takes most of a reconcile, and
most reconciles find the same as the one before.  Pure.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pdcluster_api.apiserver.body import Body
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.result import ClusterPlan

MAX_SECONDS = 3600.0
"""Longest time without a comparison.  The inputs hold all that it depends on: this is for what was
forgotten among them.
"""


@dataclass(frozen=True)
class FingerprintInputs:
    """All that the children of a PDCluster follow from, but the time.

    plan:     without its status, which is written apart
    versions: digest of the resourceVersions of all children
    """

    plan: ClusterPlan
    uid: str
    generation: int
    annotations: Mapping[str, str]
    versions: str

    @classmethod
    def of(cls, live: Live, plan: ClusterPlan) -> "FingerprintInputs":
        """The inputs of one reconcile."""
        metadata = live.body["metadata"]
        bare = replace(plan, status={}, events=(), verify=(), requeue_after_seconds=None)
        return cls(
            bare,
            live.uid,
            metadata.get("generation", 0),
            metadata.get("annotations") or {},
            _versions(live.children),
        )


@dataclass(frozen=True)
class Fingerprint:
    """Inputs with which nothing was to be written.

    until:    when they are compared again in any case
    is_known: at that time something falls due, as the renewal of a certificate does
    """

    inputs: FingerprintInputs
    until: datetime
    is_known: bool

    def holds(self, inputs: FingerprintInputs, now: datetime) -> bool:
        """Return whether a reconcile with these inputs writes nothing either."""
        return now < self.until and inputs == self.inputs

    def requeue_after_seconds(self, now: datetime) -> float | None:
        """Seconds until something falls due; None = no sooner than the resync."""
        return max(0.0, (self.until - now).total_seconds()) if self.is_known else None


def fingerprint_of(
    inputs: FingerprintInputs, now: datetime, requeue_after_seconds: float | None
) -> Fingerprint:
    """State of a PDCluster after a reconcile that wrote nothing.

    requeue_after_seconds: until something falls due; None = no sooner than the resync
    """
    longest = MAX_SECONDS * (0.5 + 0.5 * _share(inputs.uid))
    seconds = longest if requeue_after_seconds is None else min(requeue_after_seconds, longest)
    return Fingerprint(
        inputs, now + timedelta(seconds=seconds), is_known=seconds == requeue_after_seconds
    )


def _share(uid: str) -> float:
    """A number from 0 to 1 for each PDCluster, so that they are not all compared at once."""
    return zlib.crc32(uid.encode()) / 2**32


def _versions(children: Iterable[Body]) -> str:
    """A digest: uids and versions themselves would take 4 kB for each PDCluster."""
    versions = sorted(
        f"{child['metadata']['uid']} {child['metadata'].get('resourceVersion', '')}"
        for child in children
    )
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()
