"""Memory of one PDCluster between its reconciles, and the one dict that holds it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.reconcile.autoscaling import Autoscaling
from pdcluster_operator.reconcile.etcd_view import POLL_SECONDS, EtcdView
from pdcluster_operator.reconcile.fingerprint import Fingerprint
from pdcluster_operator.reconcile.pod_faults import PodFaults
from pdcluster_operator.reconcile.verification import VerificationRunner
from pdcluster_operator.reconcile.write_conflicts import WriteConflicts


@dataclass
class Session:
    """Memory of one PDCluster."""

    etcd: EtcdView
    pod_faults: PodFaults
    autoscaling: Autoscaling
    verification: VerificationRunner
    write_conflicts: WriteConflicts = field(default_factory=WriteConflicts)
    # of the object that it is about; another one of its name begins with none of it
    uid: str | None = None
    failures: tuple[WriteFailure, ...] = ()  # refused writes of the last reconcile
    fingerprint: Fingerprint | None = None  # of its last reconcile; None = that wrote, or failed to
    ready: str | None = None  # status of its Ready condition; None = not known yet
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
    """The sessions of all PDClusters."""

    def __init__(self, make: Callable[[Key], Session]) -> None:
        self._make = make
        self._sessions: dict[Key, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def find(self, key: Key) -> Session | None:
        """The session of a PDCluster; None = there is none."""
        return self._sessions.get(key)

    def of(self, key: Key) -> Session:
        if key not in self._sessions:
            self._sessions[key] = self._make(key)
        return self._sessions[key]

    def end(self, key: Key) -> Session | None:
        """End the session of a PDCluster that is gone; returns it, None = there was none."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self._own(
                [*session.stop(), asyncio.create_task(session.etcd.end(), name=f"end of {key}")]
            )
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
