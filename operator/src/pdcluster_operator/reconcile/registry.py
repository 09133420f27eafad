"""What etcd says of each cluster's workers, and the commands for them: asked seldom, in the background, unless a worker drains.

A cluster that is as it should be costs one read in a while, which no pass waits
for; its key is made due when the answer says something new.  While workers
drain, each pass reads anew, with a time limit; once an etcd has not answered no
pass waits for it any more until it does.  What is remembered is since when each drain and
each oddity lasts; the commands themselves say so too, for an operator that
starts anew.  All times but those are measured by a clock that nobody sets.
When a PDCluster is gone its commands are taken back, for nobody else would.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from pdcluster_operator.api.errors import EtcdUnreachableError
from pdcluster_operator.api.pdcluster import PDCluster
from pdcluster_operator.cluster.cache import Key
from pdcluster_operator.cluster.errors import ClusterError
from pdcluster_operator.discovery.commands import Registered, StoredRecord
from pdcluster_operator.manifests.engine_config import etcd_endpoints
from pdcluster_operator.plan.insync import odd_ones
from pdcluster_operator.plan.state import Device, Registry, WorkloadState
from pdcluster_operator.reconcile.discovery import Question

logger = logging.getLogger(__name__)
SELDOM_SECONDS = 60.0
"""Between two looks at workers of which nothing is odd."""

SOON_SECONDS = 10.0
"""Between two looks while something is odd, and after one that etcd has not answered: then twice as long each time, for long."""

MAX_PAUSE_SECONDS = 300.0

DEAD_SECONDS = 5.0
"""For so long an etcd that has not answered is not asked again, though a shrink is held."""

TAKE_BACK_SECONDS = 1.0
"""Between the pass that wants a pod to serve again and its command's end: it may be ending already, and the watch tells later."""

MAX_LOOKS = 8
"""That nobody waits for, at a time: an operator that starts has to look at all clusters."""

ASK_SECONDS = 8.0
"""Of one look, or of writing; sixteen dead endpoints would take longer."""


def workers_question(cluster: PDCluster) -> Question:
    """Where a cluster's workers are registered: the given etcd, or the one that is run for it."""
    key = Key(cluster.metadata.namespace, cluster.metadata.name)
    return Question.about(cluster.spec.discovery.etcd, key, etcd_endpoints(cluster))


class Talk(Protocol):
    """How etcd is talked to.  Each raises EtcdUnreachableError, or ClusterError where its Secret cannot be read."""

    async def registered(self, question: Question, key: Key) -> Registered:
        """Records and commands of a cluster."""

    async def command(self, question: Question, key: Key, drain: Mapping[str, datetime], serve: Collection[str]) -> None:
        """Tell pods to drain, and others to serve."""

    async def remove(self, question: Question, key: Key, records: Iterable[StoredRecord]) -> list[str]:
        """Remove the records of pods that do not exist, and have not changed; returns those pods."""


@dataclass
class _Known:
    """What is remembered of one cluster.

    at:    when etcd last answered or should have; None = it was never asked
    error: why it did not
    pause: seconds until it is asked again then
    asked: since when pods drain, or should
    spare: since when pods that are told to drain should serve
    odd:   since which look a record has no pod or a pod no record
    is_away: it does not answer since its last answer: what was odd then may have ended and begun anew
    looks: answers so far; judged: those by which `odd` was judged: what came since the last one is not odd yet
    turn:  counts looks and commands; told: the turn of what `last` says, which no look that began before it may overwrite
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
    looks: int = 0
    judged: int = 0
    turn: int = 0
    told: int = 0

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn


@dataclass
class Registrations:
    """Of all clusters.

    add:   makes a key due
    clock: seconds that only go forward
    now:   wall-clock time, in UTC, for what is written down for the next operator
    """

    talk: Talk
    add: Callable[[Key], None]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _known: dict[Key, _Known] = field(default_factory=dict)
    _looking: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LOOKS))

    def last(self, key: Key, question: Question, workloads: Iterable[WorkloadState], *, is_up: bool = True) -> Registry | None:
        """What was last known; a look that is due is begun, and makes the key due when it finds something new.

        is_up: False = etcd is known not to answer, and whatever changes that makes the key due
        """
        known = self._of(key, question)
        if not is_up:
            known.is_away = True
            found = self._registry(known, workloads)
            return found and replace(found, again_seconds=None)
        is_odd = known.last is not None and odd_ones(_states(known.last), workloads)
        self._look_if_due(key, known, known.pause if known.error else SOON_SECONDS if is_odd else SELDOM_SECONDS)
        return self._registry(known, workloads)

    async def fresh(self, key: Key, question: Question, workloads: Iterable[WorkloadState]) -> Registry | None:
        """What is so now.  An etcd that did not answer is waited for once; its answer makes the key due."""
        known = self._of(key, question)
        if known.error is None:
            await self._look(key, known)
        else:
            self._look_if_due(key, known, DEAD_SECONDS)
        return self._registry(known, workloads)

    async def command(self, key: Key, question: Question, drain: Collection[str]) -> None:
        """Let exactly these pods be told to drain, and the others that are told no longer, a moment later.

        What etcd does not take now is missing at the next look, and written then.
        """
        known, now = self._of(key, question), self.clock()
        known.asked = {pod: known.asked.get(pod, now) for pod in drain}
        told_now = known.last.commands if known.last else ()
        known.spare = {pod: known.spare.get(pod, now) for pod in told_now if pod not in drain}
        if known.last is None or known.error is not None:
            return
        told = {pod: self.now() - timedelta(seconds=now - known.asked[pod]) for pod in drain if pod not in known.last.commands}
        serve = {pod for pod, since in known.spare.items() if now - since >= TAKE_BACK_SECONDS}
        if not told and not serve:
            return
        logger.info("commands key=%s drain=%s serve=%s", key, ",".join(sorted(told)), ",".join(sorted(serve)))
        error = await _error(self.talk.command(question, key, told, serve))
        if error is None:
            commands = {**{pod: since for pod, since in known.last.commands.items() if pod not in serve}, **told}
            known.last, known.told = Registered(known.last.records, commands), known.next_turn()
        else:
            self._fail(key, known, error)

    async def remove(self, key: Key, question: Question, pods: Collection[str]) -> None:
        """Remove the records of pods that do not exist, as they were last read."""
        known = self._of(key, question)
        if not pods or known.last is None or known.error is not None:
            return
        records = [stored for pod, stored in known.last.records.items() if pod in pods]
        error = await _error(self.talk.remove(question, key, records))
        if error is not None:
            logger.warning("records not removed key=%s error=%s", key, error)
        known.at = None  # look again

    def forget(self, key: Key) -> None:
        """A PDCluster is gone, and with it whoever could take a command back later."""
        known = self._drop(key)
        if known is not None and known.last is not None and known.last.commands and known.error is None:
            task = asyncio.create_task(self._take_back(key, known.question, known.last.commands), name=f"commands of {key}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _take_back(self, key: Key, question: Question, pods: Collection[str]) -> None:
        error = await _error(self.talk.command(question, key, {}, pods))
        if error is not None:  # as of an etcd that went with its cluster
            logger.info("commands left key=%s pods=%s error=%s", key, ",".join(sorted(pods)), error)

    def _drop(self, key: Key) -> _Known | None:
        task = self._looking.pop(key, None)
        if task is not None:
            task.cancel()
        return self._known.pop(key, None)

    async def run(self) -> None:
        """Keep the looks that passes begin; none outlives it."""
        try:
            await asyncio.Event().wait()
        finally:
            tasks = [*self._looking.values(), *self._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _of(self, key: Key, question: Question) -> _Known:
        known = self._known.get(key)
        if known is None or known.question != question:
            self._drop(key)
            known = self._known[key] = _Known(question)
        return known

    def _look_if_due(self, key: Key, known: _Known, seconds: float) -> None:
        is_due = known.at is None or self.clock() - known.at >= seconds
        if is_due and key not in self._looking:
            self._looking[key] = asyncio.create_task(self._look_behind(key, known), name=f"records of {key}")

    async def _look_behind(self, key: Key, known: _Known) -> None:
        before, error = _content(known), known.error
        try:
            async with self._slots:
                await self._look(key, known)
        finally:
            if self._looking.get(key) is asyncio.current_task():
                del self._looking[key]
        if (known.error is None) != (error is None) or (known.error is None and _content(known) != before):
            self.add(key)

    async def _look(self, key: Key, known: _Known) -> None:
        turn = known.next_turn()

        async def read() -> None:
            found = await self.talk.registered(known.question, key)
            known.looks += 1
            if turn > known.told:
                known.last, known.told = found, turn

        error = await _error(read())
        if error is not None or known.last is None:
            self._fail(key, known, error or "etcd has said nothing")
            return
        if known.is_away:
            known.odd = {}
        known.error, known.pause, known.at, known.is_away = None, 0.0, self.clock(), False
        for pod, since in known.last.commands.items():
            if since is not None:
                known.asked.setdefault(pod, self.clock() - max(0.0, (self.now() - since).total_seconds()))

    def _fail(self, key: Key, known: _Known, error: str) -> None:
        if known.error is None:
            logger.info("etcd of workers does not answer key=%s error=%s", key, error)
        known.error, known.at, known.is_away = error, self.clock(), True
        known.pause = min(MAX_PAUSE_SECONDS, max(SOON_SECONDS, 2 * known.pause))

    def _registry(self, known: _Known, workloads: Iterable[WorkloadState]) -> Registry | None:
        now = self.clock()
        asked = {pod: now - since for pod, since in known.asked.items()}
        if known.error is not None:
            return Registry(asked=asked, error=known.error, again_seconds=known.pause)
        if known.last is None:
            return None
        states = _states(known.last)
        odd, is_new = odd_ones(states, workloads), known.looks != known.judged
        known.judged = known.looks
        known.odd = {pod: known.odd.get(pod, now) for pod in odd if is_new or pod in known.odd}
        since_odd = {pod: now - since for pod, since in known.odd.items()}
        return Registry(states, frozenset(known.last.commands), asked, since_odd, devices=_devices(known.last))


def _content(known: _Known) -> tuple[object, ...]:
    """What a plan could make something of."""
    if known.last is None:
        return ()
    return _states(known.last), _devices(known.last), frozenset(known.last.commands)


def _states(registered: Registered) -> dict[str, str]:
    return {pod: stored.record.state for pod, stored in registered.records.items()}


def _devices(registered: Registered) -> dict[str, Device]:
    records = {pod: stored.record for pod, stored in registered.records.items()}
    return {pod: record.device for pod, record in records.items() if record.device is not None}


async def _error(talking: Awaitable[object]) -> str | None:
    """Why it went wrong, in a sentence; None = it did not."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            await talking
    except TimeoutError:
        return f"etcd has not answered within {ASK_SECONDS:.0f} s"
    except (EtcdUnreachableError, ClusterError) as e:
        return str(e)
    except Exception as e:
        logger.exception("etcd not asked")
        return f"etcd cannot be asked ({type(e).__name__}); the operator's log says more"
    return None
