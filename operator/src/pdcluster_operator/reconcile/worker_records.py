"""Worker records of a cluster in etcd, and the drain commands: polled slowly while idle.

A healthy cluster costs one read per `IDLE_POLL_SECONDS`, in the background; it is
enqueued when the answer brings a change.  A followed cluster is read between reconciles
too: a change of a worker record comes with no event.  While workers drain, each reconcile
reads again, with a time limit; after a failed read no reconcile waits for that etcd until
it answers.  Kept: since when each drain and each mismatch lasts; the commands
hold the time too, for an operator that restarts.  All other times are by a monotonic clock.
When a PDCluster is gone its commands are removed, since nothing else would.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.errors import ClusterError
from pdcluster_api.discovery.commands import Registered, StoredRecord
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.manifests.engine_config import etcd_endpoints
from pdcluster_api.plan.observed.state import Device, Disaggregation, WorkerRecords, WorkloadState
from pdcluster_api.plan.status.disaggregating import digest
from pdcluster_api.plan.status.insync import odd_ones
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_operator.reconcile.discovery import Question

logger = logging.getLogger(__name__)
IDLE_POLL_SECONDS = 60.0
"""Between two reads of workers without a mismatch."""

ACTIVE_POLL_SECONDS = 10.0
"""Between two reads while there is a mismatch, and after a failed one: then twice as long each
time.
"""

MAX_RETRY_SECONDS = 300.0

UNREACHABLE_RETRY_SECONDS = 5.0
"""Retry of an etcd that has not answered, even while a shrink is held."""

UNDRAIN_DELAY_SECONDS = 1.0
"""Between the reconcile that wants a pod to serve again and the end of its drain command.

The pod may be terminating already, and the watch brings that later.
"""

MAX_CONCURRENT_READS = 8
"""Background reads at a time: an operator that starts has to read for all clusters."""

READ_TIMEOUT_SECONDS = 8.0
"""Timeout of one read or write; sixteen dead endpoints would take longer."""


def workers_question(cluster: PDCluster) -> Question:
    """Where a cluster's workers are registered: the given etcd, or the one that is run for it."""
    key = Key(cluster.metadata.namespace, cluster.metadata.name)
    return Question.about(cluster.spec.discovery.etcd, key, etcd_endpoints(cluster))


class Talk(Protocol):
    """Requests to etcd.

    Each raises EtcdUnreachableError, or ClusterError: its Secret is unreadable.
    """

    async def registered(self, question: Question, key: Key) -> Registered:
        """Records and commands of a cluster."""

    async def command(self, question: Question, key: Key, drain: Mapping[str, datetime], serve: Collection[str]) -> None:
        """Write drain commands for pods, and remove those of others."""

    async def remove(self, question: Question, key: Key, records: Iterable[StoredRecord]) -> list[str]:
        """Remove the records of pods that do not exist, and have not changed; returns those
        pods.
        """


@dataclass
class _Known:
    """State of one cluster.

    at:    time of the last answer or failure; None = not asked yet
    error: of the last read; None = it answered
    pause: seconds until the retry after an error
    asked: per pod, start of its drain
    spare: per pod with a drain command, since when it should serve again
    odd:   per pod, since when a record has no pod or a pod no record
    is_away: unreachable since the last successful read; mismatch timers restart
    looks: reads so far; judged: the reads that `odd` is based on: a change since is no mismatch yet
    is_followed: it is read between reconciles too
    turn:  counts reads and commands; known_turn: turn of `last`, which no earlier read may
           overwrite
    """

    question: Question
    at: float | None = None
    last: Registered | None = None
    error: str | None = None
    pause: float = 0.0
    asked: dict[str, float] = field(default_factory=dict)
    spare: dict[str, float] = field(default_factory=dict)
    odd: dict[str, float] = field(default_factory=dict)
    is_away: bool = False
    is_followed: bool = False
    looks: int = 0
    judged: int = 0
    turn: int = 0
    known_turn: int = 0

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn


def read_slots() -> asyncio.Semaphore:
    """Slots of background reads; all PDClusters share them."""
    return asyncio.Semaphore(MAX_CONCURRENT_READS)


@dataclass
class WorkerRecordsPoller:
    """Worker records and drain commands of one cluster.

    enqueue: enqueues the PDCluster
    slots:   of background reads
    clock:   seconds that only go forward
    now:     wall-clock time, in UTC, stored with commands for an operator that restarts
    """

    key: Key
    talk: Talk
    enqueue: Callable[[], None]
    slots: asyncio.Semaphore = field(default_factory=read_slots)
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _known: _Known | None = None
    _looking: asyncio.Task[None] | None = None

    def follow(self, question: Question, *, is_wanted: bool) -> None:
        """Poll without a reconcile too: no Kubernetes event comes with a change of a worker
        record.
        """
        self._of(question).is_followed = is_wanted

    def last(self, question: Question, workloads: Iterable[WorkloadState], *, is_up: bool = True) -> WorkerRecords | None:
        """Last known records; starts a due read, which enqueues the cluster when it brings a change.

        is_up: False = etcd is known not to answer, and a change of that enqueues the cluster
        """
        known = self._of(question)
        if not is_up:
            known.is_away = True
            found = self._registry(known, workloads)
            return found and replace(found, again_seconds=None)
        is_odd = known.last is not None and odd_ones(_states(known.last), workloads)
        self._look_if_due(known, known.pause if known.error else ACTIVE_POLL_SECONDS if is_odd else IDLE_POLL_SECONDS)
        return self._registry(known, workloads)

    async def fresh(self, question: Question, workloads: Iterable[WorkloadState]) -> WorkerRecords | None:
        """Read now.

        An etcd that did not answer is waited for once; its answer enqueues the cluster.
        """
        known = self._of(question)
        if known.error is None:
            await self._look(known)
        else:
            self._look_if_due(known, UNREACHABLE_RETRY_SECONDS)
        return self._registry(known, workloads)

    async def command(self, question: Question, drain: Collection[str]) -> None:
        """Write drain commands for exactly these pods; those of other pods are removed a moment
        later.

        A command that etcd does not take is missing in the next read, and written then.
        """
        known, now = self._of(question), self.clock()
        known.asked = {pod: known.asked.get(pod, now) for pod in drain}
        commanded = known.last.commands if known.last else ()
        known.spare = {pod: known.spare.get(pod, now) for pod in commanded if pod not in drain}
        if known.last is None or known.error is not None:
            return
        added = {pod: self.now() - timedelta(seconds=now - known.asked[pod]) for pod in drain if pod not in known.last.commands}
        serve = {pod for pod, since in known.spare.items() if now - since >= UNDRAIN_DELAY_SECONDS}
        if not added and not serve:
            return
        logger.info("commands key=%s drain=%s serve=%s", self.key, ",".join(sorted(added)), ",".join(sorted(serve)))
        error = await _error(self.talk.command(question, self.key, added, serve))
        if error is None:
            commands = {**{pod: since for pod, since in known.last.commands.items() if pod not in serve}, **added}
            known.last, known.known_turn = Registered(known.last.records, commands), known.next_turn()
        else:
            self._fail(known, error)

    async def remove(self, question: Question, pods: Collection[str]) -> None:
        """Remove the records of pods that do not exist, as they were last read."""
        known = self._of(question)
        if not pods or known.last is None or known.error is not None:
            return
        records = [stored for pod, stored in known.last.records.items() if pod in pods]
        error = await _error(self.talk.remove(question, self.key, records))
        if error is not None:
            logger.warning("records not removed key=%s error=%s", self.key, error)
        known.at = None  # look again

    def poll(self) -> None:
        """Start a read that is due, if the cluster is followed.

        An etcd that is known to be down is left to the reconciles.
        """
        known = self._known
        if known is not None and known.is_followed and (known.error is not None or not known.is_away):
            self._look_if_due(known, known.pause if known.error else IDLE_POLL_SECONDS)

    def stop(self) -> asyncio.Task[None] | None:
        """Cancel the read that is under way; returns it."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
        return looking

    async def end(self) -> None:
        """The PDCluster is gone: remove its commands."""
        self.stop()
        known, self._known = self._known, None
        if known is None or known.last is None or not known.last.commands or known.error is not None:
            return
        pods = known.last.commands
        error = await _error(self.talk.command(known.question, self.key, {}, pods))
        if error is not None:  # as of an etcd that went with its cluster
            logger.info("commands left key=%s pods=%s error=%s", self.key, ",".join(sorted(pods)), error)

    def _of(self, question: Question) -> _Known:
        if self._known is None or self._known.question != question:
            self.stop()
            self._known = _Known(question)
        return self._known

    def _look_if_due(self, known: _Known, seconds: float) -> None:
        is_due = known.at is None or self.clock() - known.at >= seconds
        if is_due and self._looking is None:
            self._looking = asyncio.create_task(self._look_behind(known), name=f"records of {self.key}")

    async def _look_behind(self, known: _Known) -> None:
        before, error = _content(known), known.error
        try:
            async with self.slots:
                await self._look(known)
        finally:
            if self._looking is asyncio.current_task():
                self._looking = None
        if (known.error is None) != (error is None) or (known.error is None and _content(known) != before):
            self.enqueue()

    async def _look(self, known: _Known) -> None:
        turn = known.next_turn()

        async def read() -> None:
            found = await self.talk.registered(known.question, self.key)
            known.looks += 1
            if turn > known.known_turn:
                known.last, known.known_turn = found, turn

        error = await _error(read())
        if error is not None or known.last is None:
            self._fail(known, error or "etcd has said nothing")
            return
        if known.is_away:
            known.odd = {}
        known.error, known.pause, known.at, known.is_away = None, 0.0, self.clock(), False
        for pod, since in known.last.commands.items():
            if since is not None:
                known.asked.setdefault(pod, self.clock() - max(0.0, (self.now() - since).total_seconds()))

    def _fail(self, known: _Known, error: str) -> None:
        if known.error is None:
            logger.info("etcd of workers does not answer key=%s error=%s", self.key, error)
        known.error, known.at, known.is_away = error, self.clock(), True
        known.pause = min(MAX_RETRY_SECONDS, max(ACTIVE_POLL_SECONDS, 2 * known.pause))

    def _registry(self, known: _Known, workloads: Iterable[WorkloadState]) -> WorkerRecords | None:
        now = self.clock()
        asked = {pod: now - since for pod, since in known.asked.items()}
        if known.error is not None:
            return WorkerRecords(asked=asked, error=known.error, again_seconds=known.pause)
        if known.last is None:
            return None
        states = _states(known.last)
        odd, is_new = odd_ones(states, workloads), known.looks != known.judged
        known.judged = known.looks
        known.odd = {pod: known.odd.get(pod, now) for pod in odd if is_new or pod in known.odd}
        since_odd = {pod: now - since for pod, since in known.odd.items()}
        last = known.last
        return WorkerRecords(
            states,
            frozenset(last.commands),
            asked,
            since_odd,
            devices=_devices(last),
            disaggregation=_disaggregation(last),
        )


def _content(known: _Known) -> tuple[object, ...]:
    """Parts of the records that a plan depends on."""
    if known.last is None:
        return ()
    last = known.last
    disaggregation = digest(_disaggregation(last))
    return _states(last), _devices(last), frozenset(last.commands), disaggregation


def _states(registered: Registered) -> dict[str, str]:
    return {pod: stored.record.state for pod, stored in registered.records.items()}


def _devices(registered: Registered) -> dict[str, Device]:
    records = {pod: stored.record for pod, stored in registered.records.items()}
    return {pod: record.device for pod, record in records.items() if record.device is not None}


def _disaggregation(registered: Registered) -> dict[str, Disaggregation]:
    found = {pod: stored.record.disaggregation for pod, stored in registered.records.items()}
    return {pod: said for pod, said in found.items() if said is not None}


async def _error(talking: Awaitable[object]) -> str | None:
    """Return the error as a sentence; None = there was none."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            await talking
    except TimeoutError:
        return f"etcd has not answered within {READ_TIMEOUT_SECONDS:.0f} s"
    except (EtcdUnreachableError, ClusterError) as e:
        return str(e)
    except Exception as e:
        logger.exception("etcd not asked")
        return f"etcd cannot be asked ({type(e).__name__}); the operator's log says more"
    return None
