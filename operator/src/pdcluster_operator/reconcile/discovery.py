"""Check given etcd endpoints in the background and keep the answers, so that no reconcile waits.

Each cluster has a check of its own, since its rights may end at its own keys.  A PDCluster
is enqueued when the answer about its etcd changes.  Every check runs on its
own and has a time limit, so slow ones do not add up.  An etcd that is run for a
cluster is not asked here: its pods' readiness says the same.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdcluster_operator.api.sections import EtcdSpec
from pdcluster_operator.cluster.cache import Key
from pdcluster_operator.discovery.keys import ROOT, records_prefix

logger = logging.getLogger(__name__)
CHECK_PERIOD_SECONDS = 15.0
FIRST_ANSWER_TIMEOUT_SECONDS = 4.0
"""How long the first reconcile of a cluster waits for an answer, so that its first status need not
be corrected.
"""

CHECK_TIMEOUT_SECONDS = 60.0
"""Of one question: sixteen endpoints, 3 s each, and the Secret."""

MAX_WAITING = 2
"""Reconciles that wait for a first answer at a time: more would take all runners, and an answer
enqueues its cluster anyway.
"""

NOT_YET = "has not answered yet"


@dataclass(frozen=True)
class Question:
    """namespace: of the TLS Secret; prefix: of the keys of the cluster's worker records."""

    endpoints: tuple[str, ...]
    namespace: str = ""
    tls_secret: str | None = None
    prefix: str = ROOT

    @classmethod
    def about(cls, etcd: EtcdSpec, key: Key, endpoints: tuple[str, ...] | None = None) -> "Question":
        """The question that a PDCluster's section asks.  endpoints: others than the given ones"""
        prefix = records_prefix(key.namespace, key.name)
        return cls(etcd.endpoints if endpoints is None else endpoints, key.namespace, etcd.tls_secret, prefix)


@dataclass
class Discovery:
    """The questions of all clusters and their last answers.

    ask: returns the error why the etcd cannot be used, None = it answers
    enqueue: adds a key to the work queue
    """

    ask: Callable[[Question], Awaitable[str | None]]
    add: Callable[[Key], None]
    _askers: dict[Question, set[Key]] = field(default_factory=dict)
    _asked: dict[Key, Question] = field(default_factory=dict)
    _answers: dict[Question, str | None] = field(default_factory=dict)
    _asking: dict[Question, asyncio.Task[None]] = field(default_factory=dict)
    _num_waiting: int = 0

    async def error(self, key: Key, question: Question) -> str | None:
        """Last known error why the etcd cannot be used; None = it answers."""
        if self._asked.get(key) != question:
            self.forget(key)
            self._asked[key] = question
            self._askers.setdefault(question, set()).add(key)
        if question not in self._answers:
            await self._first_answer(question)
        return self._answers.get(question, f"etcd at {', '.join(question.endpoints)} {NOT_YET}")

    def forget(self, key: Key) -> None:
        """A PDCluster is gone, or asks something else now."""
        question = self._asked.pop(key, None)
        if question is None:
            return
        self._askers[question].discard(key)
        if not self._askers[question]:
            del self._askers[question]
            self._answers.pop(question, None)

    async def run(self) -> None:
        """Ask everything again and again; what is still being asked is not asked twice."""
        try:
            while True:
                await asyncio.sleep(CHECK_PERIOD_SECONDS)
                for question in self._askers:
                    self._begin(question)
        finally:
            tasks = list(self._asking.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_answer(self, question: Question) -> None:
        task = self._begin(question)
        if self._num_waiting >= MAX_WAITING:
            return
        self._num_waiting += 1
        try:
            await asyncio.wait({task}, timeout=FIRST_ANSWER_TIMEOUT_SECONDS)
        finally:
            self._num_waiting -= 1

    def _begin(self, question: Question) -> asyncio.Task[None]:
        if question not in self._asking:
            self._asking[question] = asyncio.create_task(self._ask(question), name="etcd")
        return self._asking[question]

    async def _ask(self, question: Question) -> None:
        try:
            answer = await self._answer(question)
        finally:
            del self._asking[question]
        if question not in self._askers or (question in self._answers and self._answers[question] == answer):
            return
        self._answers[question] = answer
        logger.info("etcd changed endpoints=%s error=%s", ",".join(question.endpoints), answer)
        for key in self._askers[question]:
            self.add(key)

    async def _answer(self, question: Question) -> str | None:
        """Return an error in any case: the result of the task is not awaited."""
        where = f"etcd at {', '.join(question.endpoints)}"
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                return await self.ask(question)
        except TimeoutError:
            return f"{where} has not answered within {CHECK_TIMEOUT_SECONDS:.0f} s"
        except Exception as e:
            logger.exception("etcd not asked endpoints=%s", ",".join(question.endpoints))
            return f"{where} cannot be asked ({type(e).__name__}); the operator's log says more"
