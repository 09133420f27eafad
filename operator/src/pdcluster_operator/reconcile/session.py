"""Memory of one PDCluster between its reconciles, and the one dict that holds it."""

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.plan.observed.state import Problem, WriteFailure
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_operator.informer.cache import ObjectVersion
from pdcluster_operator.reconcile.autoscaling import Autoscaling
from pdcluster_operator.reconcile.etcd_view import POLL_SECONDS, EtcdView
from pdcluster_operator.reconcile.pod_faults import PodFaults
from pdcluster_operator.reconcile.verification import VerificationRunner
from pdcluster_operator.reconcile.write_conflicts import WriteConflicts
from pdcluster_operator.writes.actions import ObjectName

# Upper bound between full comparisons, in case the fingerprint misses an input
MAX_SECONDS = 3600.0


@dataclass(frozen=True)
class ObservedInputs:
    change: int  # of the cache, in the PDCluster or its children (`Cache.change`)
    # what is known of its etcd (`EtcdView.standing`); None = that depends on the time
    etcd: tuple[object, ...] | None
    faults: Mapping[str, Problem]  # by StatefulSet, the problem that keeps it from getting pods
    key_secret: str | None  # Secret of the API keys, None = none is named
    # versions of the PDClusters that service.models names; None = not there
    others: Mapping[Key, ObjectVersion | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Fingerprint:
    """Inputs of a reconcile that had nothing to write: with the same ones nothing is compared
    again, and where nothing was left to do either, nothing is observed again.
    """

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

    def over(self, live: Live, plan: ClusterPlan) -> "Fingerprint":
        """The same after what was reported changed a child."""
        return replace(self, children=digest_of(live, plan))

    def requeue_after_seconds(self, now: datetime) -> float | None:
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
        return max(0.0, ((self.observed_until or now) - now).total_seconds())


def digest_of(live: Live, plan: ClusterPlan) -> bytes:
    """Digest of all that the children of a PDCluster follow from, but the time."""
    metadata = live.body["metadata"]
    children = (child["metadata"] for child in live.children)
    parts = (
        live.uid,
        metadata.get("generation"),
        sorted((metadata.get("annotations") or {}).items()),
        sorted(plan.commands),
        replace(plan, commands=frozenset()),
        sorted((each["uid"], each.get("resourceVersion")) for each in children),
    )
    return hashlib.sha256(repr(parts).encode()).digest()


@dataclass
class Session:
    etcd: EtcdView
    pod_faults: PodFaults
    autoscaling: Autoscaling
    verification: VerificationRunner
    write_conflicts: WriteConflicts = field(default_factory=WriteConflicts)
    settled: dict[ObjectName, bytes] = field(default_factory=dict)  # as `compare` keeps it
    # of the object that it is about; another one of its name begins with none of it
    uid: str | None = None
    failures: tuple[WriteFailure, ...] = ()  # refused writes of the last reconcile
    fingerprint: Fingerprint | None = None  # of its last reconcile; None = that wrote, or failed to
    ready: str | None = None  # status of its Ready condition; None = not known yet
    others: frozenset[Key] = frozenset()  # PDClusters that service.models names
    # the running reconcile has learnt something that no event will bring
    needs_requeue: bool = False

    def begin(self, uid: str) -> None:
        self.uid, self.needs_requeue = uid, False
        if self.fingerprint is not None:
            self.fingerprint = replace(self.fingerprint, observed=None)

    def stop(self) -> list[asyncio.Task[None]]:
        stopped = self.etcd.stop(), self.autoscaling.stop(), *self.verification.stop()
        return [task for task in stopped if task is not None]


class Sessions:
    def __init__(self, make: Callable[[Key], Session]) -> None:
        self._make = make
        self._sessions: dict[Key, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def naming(self, key: Key) -> list[Key]:
        """PDClusters whose service.models name this one."""
        return [each for each, session in self._sessions.items() if key in session.others]

    def find(self, key: Key) -> Session | None:
        return self._sessions.get(key)

    def of(self, key: Key) -> Session:
        if key not in self._sessions:
            self._sessions[key] = self._make(key)
        return self._sessions[key]

    def end(self, key: Key) -> Session | None:
        """End the session of a PDCluster that is gone; returns it, None = there was none."""
        session = self._sessions.pop(key, None)
        if session is not None:
            ending = asyncio.create_task(session.etcd.end(), name=f"end of {key}")
            self._own([*session.stop(), ending])
        return session

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                for session in self:
                    session.etcd.poll()
        finally:
            for session in self:
                self._own(session.stop())
            for task in self._ending:
                task.cancel()
            await asyncio.gather(*self._ending, return_exceptions=True)

    def _own(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        for task in tasks:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
