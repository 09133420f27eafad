"""One view of a PDCluster's etcd: its worker records as last read, and whether it answers. It
answers when the last whole read did. After a failed read none waits for it until it answers. A
mismatch begins with a read that found it, and grows no older while etcd is away.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from pdcluster_api.apiserver.errors import ClusterError
from pdcluster_api.discovery.commands import Registered
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.plan.observed.state import WorkerRecords, WorkloadState
from pdcluster_api.plan.status.disaggregating import digest
from pdcluster_api.plan.status.discovery import find_mismatches
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests, EtcdTarget
from pdcluster_schema.backoff import Backoff

logger = logging.getLogger(__name__)
# Background reads at a time: an operator that starts has to read for all clusters
MAX_CONCURRENT_READS = 8

# Reconciles that wait for a first answer at a time: more would take all runners, and an answer
# enqueues its cluster anyway
MAX_FIRST_READS = 2

# Longest wait of a cluster's first reconcile for an answer, so that its first status need not be
# corrected
FIRST_READ_TIMEOUT_SECONDS = 4.0

READ_TIMEOUT_SECONDS = 8.0  # Timeout of one read or write for which a reconcile waits

# Time limit of a read for which none waits: sixteen endpoints, 3 s each, and the Secret
BACKGROUND_TIMEOUT_SECONDS = 60.0

POLL_SECONDS = 5.0  # Between two looks at what is due, of all PDClusters
IDLE_POLL_SECONDS = 60.0  # Between two reads of workers without a mismatch
ACTIVE_POLL_SECONDS = 10.0  # Between two reads while there is a mismatch
EXTERNAL_POLL_SECONDS = 15.0  # Between two reads of a given etcd, whether it answers or not
UNREACHABLE_RETRY_SECONDS = 5.0  # Retry of an etcd that has not answered while a shrink is held
RETRY = Backoff(first=10.0, most=300.0)  # Problem of a managed etcd that did not answer

# Between the reconcile that wants a pod to serve again and the end of its drain command. The pod
# may be terminating already, and the watch brings that later.
UNDRAIN_DELAY_SECONDS = 1.0


class _TimeoutMessage(str):
    """The error of a request that took too long; it reads as that of any other."""


@dataclass(frozen=True)
class ReadLimits:
    # background reads; of given etcds all are read at once, so that dead ones hold up none
    reads: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_READS)
    )
    # reconciles that wait for a first answer
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FIRST_READS))


@dataclass
class _Known:
    target: EtcdTarget
    # time of the last answer or failure; None = not read yet, or to be read again
    at: float | None = None
    last: Registered | None = None
    error: str | None = None  # of the last read or command; None = it answered
    # no read answers.  One that was cut short for a reconcile, and a refused command, leave that as
    # it was: `Ready` would follow each of them, and the next whole read
    is_down: bool = True
    num_failures: int = 0
    draining: dict[str, float] = field(default_factory=dict)  # since when, of pods that should
    # since when pods that have a command should serve again
    undraining: dict[str, float] = field(default_factory=dict)
    # per pod, since when a record has no pod or a pod no record
    mismatched: dict[str, float] = field(default_factory=dict)
    is_away: bool = False  # unreachable since the last successful read; mismatch timers restart
    is_tracked: bool = False  # it is read between reconciles too
    reads: int = 0  # so far
    judged: int = 0  # those that `mismatched` is based on: a change since is no mismatch yet
    turn: int = 0  # counts reads and commands
    known_turn: int = 0  # turn of `last`, which no earlier read may overwrite

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn

    @property
    def retry_seconds(self) -> float:
        return EXTERNAL_POLL_SECONDS if self.target.is_external else RETRY.after(self.num_failures)

    @property
    def idle_seconds(self) -> float:
        is_good = self.error is None and not self.target.is_external
        return IDLE_POLL_SECONDS if is_good else self.retry_seconds

    @property
    def seen(self) -> tuple[object, ...]:
        """Everything of which a change enqueues the cluster."""
        last = self.last
        if last is None:
            return self.error, self.is_down
        content = (
            *(last.states, last.devices, last.stopped_tiers),
            *(frozenset(last.commands), last.is_full, last.roles, last.serves),
        )
        return self.error, self.is_down, *content, digest(last.disaggregation)

    def answered(self, at: float, now: datetime) -> None:
        """Note a read that succeeded.  now: wall-clock time, by which commands hold theirs."""
        if self.is_away:
            self.mismatched = {}
        self.error, self.num_failures, self.at = None, 0, at
        self.is_away = self.is_down = False
        for pod, since in (self.last.commands if self.last else {}).items():
            if since is not None:
                self.draining.setdefault(pod, at - max(0.0, (now - since).total_seconds()))

    def failed(self, error: str, at: float, *, is_down: bool) -> None:
        if self.error != error:
            logger.info("etcd does not answer key=%s error=%s", self.target.key, error)
        self.error, self.at, self.is_away, self.is_down = error, at, True, is_down
        self.num_failures += 1

    def records(self, workloads: Iterable[WorkloadState], now: float) -> WorkerRecords | None:
        """The last answer, or error, as a plan takes it; None = neither yet."""
        requested = {pod: now - since for pod, since in self.draining.items()}
        if self.error is not None:
            retry = self.retry_seconds
            return WorkerRecords(requested=requested, error=self.error, again_seconds=retry)
        last = self.last
        if last is None:
            return None
        # since when each mismatch lasts; one that no read has shown is none yet
        is_new, self.judged = self.reads != self.judged, self.reads
        self.mismatched = {
            pod: self.mismatched.get(pod, now)
            for pod in find_mismatches(last.states, workloads)
            if is_new or pod in self.mismatched
        }
        return WorkerRecords(
            last.states,
            frozenset(last.commands),
            requested,
            {pod: now - since for pod, since in self.mismatched.items()},
            devices=last.devices,
            disaggregation=last.disaggregation,
            stopped_tiers=last.stopped_tiers,
            roles=last.roles,
            serves=last.serves,
        )


@dataclass
class EtcdView:
    """Worker records, drain commands and reachability of one PDCluster's etcd.  It is read behind
    the reconciles, once at a time.
    """

    requests: EtcdRequests
    enqueue: Callable[[], None]  # enqueues the PDCluster
    limits: ReadLimits = field(default_factory=ReadLimits)
    clock: Callable[[], float] = time.monotonic  # seconds that only go forward
    # wall-clock time, in UTC, stored with commands for an operator that restarts
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    reading: asyncio.Task[None] | None = None
    _known: _Known | None = None

    def follow(self, target: EtcdTarget, *, is_tracked: bool) -> None:
        """Read between reconciles too: no event comes with a change of a worker record."""
        self._of(target).is_tracked = is_tracked

    async def error(self, target: EtcdTarget) -> str | None:
        """Error of a given etcd that answers no read; None = it does.  Waits for a first read, a
        while and unless others do.
        """
        known = self._of(target)
        if known.last is None and known.error is None:
            reading = self._begin_read(known, 0.0)
            if reading is not None and not self.limits.waiting.locked():
                async with self.limits.waiting:
                    await asyncio.wait({reading}, timeout=FIRST_READ_TIMEOUT_SECONDS)
        if known.last is None and known.error is None:
            return target.silence
        return known.error if known.is_down else None

    def is_full(self, target: EtcdTarget) -> bool:
        known = self._of(target)
        return known.last is not None and known.last.is_full

    def last(
        self, target: EtcdTarget, workloads: Iterable[WorkloadState], *, is_up: bool = True
    ) -> WorkerRecords | None:
        """Last known records; starts a due read, which enqueues the cluster if it brings a change.
        is_up: False = etcd is known not to answer, and a change of that enqueues the cluster
        """
        known = self._of(target)
        if not is_up:
            known.is_away = True
            found = known.records(workloads, self.clock())
            return found and replace(found, again_seconds=None)
        states = known.last.states if known.last and known.error is None else None
        is_mismatched = states is not None and find_mismatches(states, workloads)
        self._begin_read(known, ACTIVE_POLL_SECONDS if is_mismatched else known.idle_seconds)
        return known.records(workloads, self.clock())

    async def fresh(
        self, target: EtcdTarget, workloads: Iterable[WorkloadState]
    ) -> WorkerRecords | None:
        """Read now.  One that did not answer is read behind; its answer enqueues the cluster."""
        known = self._of(target)
        if known.error is None:
            await self._read(known, READ_TIMEOUT_SECONDS)
        else:
            self._begin_read(known, UNREACHABLE_RETRY_SECONDS)
        return known.records(workloads, self.clock())

    async def command(
        self,
        target: EtcdTarget,
        drain: Collection[str],
        roles: Mapping[str, str] | None = None,
        graces: Mapping[str, int] | None = None,
    ) -> None:
        """Write drain commands for exactly these pods; those of other pods are removed a moment
        later.  A command that etcd does not take is missing in the next read, and written then.

        roles:  the commands to have another role, all of them
        graces: seconds that pods have from SIGTERM on, where that is less than usual
        """
        known, now = self._of(target), self.clock()
        written = known.last.commands if known.last else {}
        known.draining = {pod: known.draining.get(pod, now) for pod in drain}
        spare = [pod for pod in written if pod not in drain]
        known.undraining = {pod: known.undraining.get(pod, now) for pod in spare}
        if known.last is None or known.error is not None:
            return
        added = {
            pod: self.now() - timedelta(seconds=now - since)
            for pod, since in known.draining.items()
            if pod not in written or (graces or {}).get(pod) != known.last.graces.get(pod)
        }
        serve = [
            pod for pod, since in known.undraining.items() if now - since >= UNDRAIN_DELAY_SECONDS
        ]
        changed = _changed_roles(roles or {}, known.last.roles)
        if not added and not serve and not changed:
            return
        shown = ",".join(sorted(added)), ",".join(sorted(serve)), changed
        logger.info("commands key=%s drain=%s serve=%s roles=%s", target.key, *shown)
        request = self.requests.command(target, added, serve, changed, graces)
        error = await _error_of(target, request, READ_TIMEOUT_SECONDS)
        if error is not None:
            known.failed(error, self.clock(), is_down=known.is_down)
            return
        kept = {pod: since for pod, since in known.last.commands.items() if pod not in serve}
        known.last = replace(
            known.last,
            commands={**kept, **added},
            roles=dict(roles or {}),
            graces=dict(graces or {}),
        )
        known.known_turn = known.next_turn()

    async def remove(self, target: EtcdTarget, pods: Collection[str]) -> None:
        """Remove the records of pods that do not exist, as they were last read."""
        known = self._of(target)
        if not pods or known.last is None or known.error is not None:
            return
        records = [stored for pod, stored in known.last.records.items() if pod in pods]
        request = self.requests.remove(target, records)
        error = await _error_of(target, request, READ_TIMEOUT_SECONDS)
        if error is not None:
            logger.warning("records not removed key=%s error=%s", target.key, error)
        known.at = None  # read again

    @property
    def standing(self) -> tuple[object, ...] | None:
        """All that a plan takes from here; None where it depends on the time, too."""
        known = self._known
        if known is None:
            return ()
        return None if known.mismatched or known.draining or known.undraining else known.seen

    def read_if_due(self) -> None:
        """Start a read that a reconcile would start."""
        if self._known is not None and not self._known.is_away:
            self._begin_read(self._known, self._known.idle_seconds)

    def poll(self) -> None:
        """Start a read that is due without a reconcile.  One that is run for the cluster and known
        to be down is left to the reconciles.
        """
        known = self._known
        if known is None:
            return
        is_polled = known.is_tracked and (known.error is not None or not known.is_away)
        if known.target.is_external or is_polled:
            self._begin_read(known, known.idle_seconds)

    def stop(self) -> asyncio.Task[None] | None:
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()
        return reading

    async def end(self) -> None:
        """Take back the commands of a cluster that is gone."""
        self.stop()
        known, self._known = self._known, None
        if known is None or known.error is not None or known.last is None:
            return
        pods, roles = known.last.commands, dict.fromkeys(known.last.roles)
        if not pods and not roles:
            return
        request = self.requests.command(known.target, {}, pods, roles)
        error = await _error_of(known.target, request, READ_TIMEOUT_SECONDS)
        if error is not None:  # as of an etcd that went with its cluster
            names = ",".join(sorted({*pods, *roles}))
            logger.info("commands left key=%s pods=%s error=%s", known.target.key, names, error)

    def _of(self, target: EtcdTarget) -> _Known:
        if self._known is None or self._known.target != target:
            self.stop()
            self._known = _Known(target)
        return self._known

    def _begin_read(self, known: _Known, seconds: float) -> asyncio.Task[None] | None:
        """Start a read, unless one is under way or has ended less than so many seconds ago; returns
        the one that is under way.
        """
        is_due = known.at is None or self.clock() - known.at >= seconds
        if is_due and self.reading is None:
            name = f"records of {known.target.key}"
            self.reading = asyncio.create_task(self._read_behind(known), name=name)
        return self.reading

    async def _read_behind(self, known: _Known) -> None:
        before = known.seen
        try:
            async with contextlib.nullcontext() if known.target.is_external else self.limits.reads:
                await self._read(known, BACKGROUND_TIMEOUT_SECONDS)
        finally:
            if self.reading is asyncio.current_task():
                self.reading = None
        if known.seen != before:
            self.enqueue()

    async def _read(self, known: _Known, seconds: float) -> None:
        turn = known.next_turn()

        async def read_once() -> None:
            found = await self.requests.registered(known.target)
            known.reads += 1
            if turn > known.known_turn:
                known.last, known.known_turn = found, turn

        error = await _error_of(known.target, read_once(), seconds)
        if error is None:
            if known.error is not None:
                logger.info("etcd answers again key=%s", known.target.key)
            known.answered(self.clock(), self.now())
        elif turn > known.known_turn:  # else a later read has answered
            is_cut = isinstance(error, _TimeoutMessage) and seconds < BACKGROUND_TIMEOUT_SECONDS
            known.failed(error, self.clock(), is_down=known.is_down if is_cut else True)


def _changed_roles(desired: Mapping[str, str], written: Mapping[str, str]) -> dict[str, str | None]:
    """Commands to write; None = to remove."""
    changed = {pod: desired.get(pod) for pod in {*desired, *written}}
    return {pod: role for pod, role in changed.items() if role != written.get(pod)}


async def _error_of(target: EtcdTarget, request: Awaitable[object], seconds: float) -> str | None:
    """Return the error of a request as a sentence; None = there was none."""
    try:
        async with asyncio.timeout(seconds):
            await request
    except TimeoutError:
        return _TimeoutMessage(target.silence)
    except EtcdUnreachableError as e:
        logger.debug("etcd not read key=%s reason=%r", target.key, e.reason)
        return str(e)
    except ClusterError as e:
        return str(e)
    except Exception as e:
        logger.exception("etcd not asked key=%s", target.key)
        return f"{target} cannot be asked ({type(e).__name__}); the operator's log says more"
    return None
