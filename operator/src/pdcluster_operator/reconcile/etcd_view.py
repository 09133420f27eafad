"""One view of a PDCluster's etcd: its worker records as last read, and whether it answers. It
answers when the last whole read did. After a failed read none waits for it until it answers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from pdcluster_api.apiserver.errors import ClusterError
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.plan.observed.state import WorkerRecords, WorkloadState
from pdcluster_operator.reconcile.etcd_requests import EtcdRequests, EtcdTarget
from pdcluster_operator.reconcile.known_records import KnownRecords

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


@dataclass(frozen=True)
class ReadLimits:
    """Bounds that all PDClusters share."""

    # background reads; of given etcds all are read at once, so that dead ones hold up none
    reads: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_READS)
    )
    # reconciles that wait for a first answer
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FIRST_READS))


@dataclass
class EtcdReader:
    """Reads one etcd, behind the reconciles once at a time."""

    requests: EtcdRequests
    enqueue: Callable[[], None]
    slots: ReadLimits
    clock: Callable[[], float]
    now: Callable[[], datetime]
    reading: asyncio.Task[None] | None = None

    async def first_read(self) -> None:
        """Wait a while for the read that is under way, unless others do."""
        if self.reading is not None and not self.slots.waiting.locked():
            async with self.slots.waiting:
                await asyncio.wait({self.reading}, timeout=FIRST_READ_TIMEOUT_SECONDS)

    def read_if_due(self, known: KnownRecords, seconds: float) -> None:
        """Start a read, unless one is under way or has ended less than so many seconds ago."""
        is_due = known.at is None or self.clock() - known.at >= seconds
        if is_due and self.reading is None:
            self.reading = asyncio.create_task(
                self._read_behind(known), name=f"records of {known.target.key}"
            )

    async def _read_behind(self, known: KnownRecords) -> None:
        before = known.seen
        try:
            async with contextlib.nullcontext() if known.target.is_external else self.slots.reads:
                await self.read(known, BACKGROUND_TIMEOUT_SECONDS)
        finally:
            if self.reading is asyncio.current_task():
                self.reading = None
        if known.seen != before:
            self.enqueue()

    async def read(self, known: KnownRecords, timeout: float | None = None) -> None:
        """Read now.  timeout: in seconds; None = that of a read for which a reconcile waits."""
        seconds = READ_TIMEOUT_SECONDS if timeout is None else timeout
        turn = known.next_turn()

        async def read_once() -> None:
            found = await self.requests.registered(known.target)
            known.reads += 1
            if turn > known.known_turn:
                known.last, known.known_turn = found, turn

        error = await error_of(known.target, read_once(), seconds)
        if error is not None:
            if turn > known.known_turn:  # else a later read has answered
                is_cut = isinstance(error, TimeoutMessage) and seconds < BACKGROUND_TIMEOUT_SECONDS
                self.fail(known, error, is_down=known.is_down if is_cut else True)
            return
        if known.error is not None:
            logger.info("etcd answers again key=%s", known.target.key)
        known.answered(self.clock(), self.now())

    def fail(self, known: KnownRecords, error: str, *, is_down: bool) -> None:
        if known.error != error:
            logger.info("etcd does not answer key=%s error=%s", known.target.key, error)
        known.failed(error, self.clock(), is_down=is_down)

    def stop(self) -> asyncio.Task[None] | None:
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.cancel()
        return reading


class TimeoutMessage(str):
    """The error of a request that took too long; it reads as that of any other."""


async def error_of(
    target: EtcdTarget, request: Awaitable[object], timeout: float | None = None
) -> str | None:
    """Return the error of a request as a sentence; None = there was none.  timeout: in seconds;
    None = that of a request for which a reconcile waits.
    """
    seconds = READ_TIMEOUT_SECONDS if timeout is None else timeout
    try:
        async with asyncio.timeout(seconds):
            await request
    except TimeoutError:
        return TimeoutMessage(target.silence)
    except EtcdUnreachableError as e:
        logger.debug("etcd not read key=%s reason=%r", target.key, e.reason)
        return str(e)
    except ClusterError as e:
        return str(e)
    except Exception as e:
        logger.exception("etcd not asked key=%s", target.key)
        return f"{target} cannot be asked ({type(e).__name__}); the operator's log says more"
    return None


POLL_SECONDS = 5.0  # Between two looks at what is due, of all PDClusters

ACTIVE_POLL_SECONDS = 10.0  # Between two reads while there is a mismatch

UNREACHABLE_RETRY_SECONDS = 5.0  # Retry of an etcd that has not answered while a shrink is held


@dataclass
class EtcdView:
    """Worker records, drain commands and reachability of one PDCluster's etcd."""

    requests: EtcdRequests
    enqueue: Callable[[], None]  # enqueues the PDCluster
    slots: ReadLimits = field(default_factory=ReadLimits)
    clock: Callable[[], float] = time.monotonic  # seconds that only go forward
    # wall-clock time, in UTC, stored with commands for an operator that restarts
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _known: KnownRecords | None = None
    reader: EtcdReader = field(init=False, repr=False)  # makes the reads

    def __post_init__(self) -> None:
        self.reader = EtcdReader(self.requests, self.enqueue, self.slots, self.clock, self.now)

    def follow(self, target: EtcdTarget, *, is_tracked: bool) -> None:
        """Read between reconciles too: no event comes with a change of a worker record."""
        self._of(target).is_tracked = is_tracked

    async def error(self, target: EtcdTarget) -> str | None:
        """Error of a given etcd that answers no read; None = it does.  Waits for a first read."""
        known = self._of(target)
        if not known.has_result:
            self.reader.read_if_due(known, 0.0)
            await self.reader.first_read()
        if not known.has_result:
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
        is_mismatched = known.has_mismatch(workloads)
        self.reader.read_if_due(known, ACTIVE_POLL_SECONDS if is_mismatched else known.idle_seconds)
        return known.records(workloads, self.clock())

    async def fresh(
        self, target: EtcdTarget, workloads: Iterable[WorkloadState]
    ) -> WorkerRecords | None:
        """Read now.  One that did not answer is read behind; its answer enqueues the cluster."""
        known = self._of(target)
        if known.error is None:
            await self.reader.read(known)
        else:
            self.reader.read_if_due(known, UNREACHABLE_RETRY_SECONDS)
        return known.records(workloads, self.clock())

    async def command(self, target: EtcdTarget, drain: Collection[str]) -> None:
        """Write drain commands for exactly these pods; those of other pods are removed a moment
        later.  A command that etcd does not take is missing in the next read, and written then.
        """
        known, now = self._of(target), self.clock()
        known.commands.ask(drain, known.last.commands if known.last else (), now)
        if known.last is None or known.error is not None:
            return
        desired = known.commands.missing(known.last.commands, now)
        serve = known.commands.removable(now)
        if not desired and not serve:
            return
        added = {pod: self.now() - timedelta(seconds=age) for pod, age in desired.items()}
        logger.info(
            "commands key=%s drain=%s serve=%s",
            target.key,
            ",".join(sorted(added)),
            ",".join(sorted(serve)),
        )
        error = await error_of(target, self.requests.command(target, added, serve))
        if error is None:
            kept = {pod: since for pod, since in known.last.commands.items() if pod not in serve}
            known.last = replace(known.last, commands={**kept, **added})
            known.known_turn = known.next_turn()
        else:
            self.reader.fail(known, error, is_down=known.is_down)

    async def remove(self, target: EtcdTarget, pods: Collection[str]) -> None:
        """Remove the records of pods that do not exist, as they were last read."""
        known = self._of(target)
        if not pods or known.last is None or known.error is not None:
            return
        records = [stored for pod, stored in known.last.records.items() if pod in pods]
        error = await error_of(target, self.requests.remove(target, records))
        if error is not None:
            logger.warning("records not removed key=%s error=%s", target.key, error)
        known.at = None  # read again

    @property
    def standing(self) -> tuple[object, ...] | None:
        """All that a plan takes from here; None where it depends on the time, too."""
        known = self._known
        if known is None:
            return ()
        return None if known.mismatched or known.commands.is_any else known.seen

    def read_if_due(self) -> None:
        """Start a read that a reconcile would start."""
        if self._known is not None and not self._known.is_away:
            self.reader.read_if_due(self._known, self._known.idle_seconds)

    def poll(self) -> None:
        """Start a read that is due without a reconcile.  One that is run for the cluster and known
        to be down is left to the reconciles.
        """
        known = self._known
        if known is None:
            return
        if known.target.is_external or (
            known.is_tracked and (known.error is not None or not known.is_away)
        ):
            self.reader.read_if_due(known, known.idle_seconds)

    def stop(self) -> asyncio.Task[None] | None:
        return self.reader.stop()

    async def end(self) -> None:
        self.stop()
        known, self._known = self._known, None
        if (
            known is None
            or known.last is None
            or not known.last.commands
            or known.error is not None
        ):
            return
        pods = known.last.commands
        error = await error_of(known.target, self.requests.command(known.target, {}, pods))
        if error is not None:  # as of an etcd that went with its cluster
            logger.info(
                "commands left key=%s pods=%s error=%s",
                known.target.key,
                ",".join(sorted(pods)),
                error,
            )

    def _of(self, target: EtcdTarget) -> KnownRecords:
        if self._known is None or self._known.target != target:
            self.stop()
            self._known = KnownRecords(target)
        return self._known
