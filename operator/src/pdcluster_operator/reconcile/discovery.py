"""Check a given etcd in the background and keep the answer, so that no reconcile waits.

Each PDCluster has a check of its own, since its rights may end at its own keys.  It is
enqueued when the answer about its etcd changes.  Every check runs on its own and has a
time limit, so slow ones do not add up.  An etcd that is run for a cluster is not asked
here: its pods' readiness says the same.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdcluster_api.apiserver.body import Key
from pdcluster_api.discovery.keys import ROOT, records_prefix
from pdcluster_api.schema.sections import EtcdSpec

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


def first_answer_slots() -> asyncio.Semaphore:
    """Slots of the reconciles that wait for a first answer; all PDClusters share them."""
    return asyncio.Semaphore(MAX_WAITING)


@dataclass
class EtcdCheck:
    """The question of one PDCluster about a given etcd, and the last answer.

    ask:     returns the error why the etcd cannot be used, None = it answers
    enqueue: enqueues the PDCluster
    slots:   of reconciles that wait for a first answer
    """

    ask: Callable[[Question], Awaitable[str | None]]
    enqueue: Callable[[], None]
    slots: asyncio.Semaphore = field(default_factory=first_answer_slots)
    _question: Question | None = None
    _has_answer: bool = False
    _error: str | None = None
    _asking: asyncio.Task[None] | None = None

    async def error(self, question: Question) -> str | None:
        """Last known error why the etcd cannot be used; None = it answers."""
        if self._question != question:
            self.stop()
            self._question = question
        if not self._has_answer:
            await self._first_answer(question)
        return self._error if self._has_answer else f"etcd at {', '.join(question.endpoints)} {NOT_YET}"

    def stop(self) -> asyncio.Task[None] | None:
        """Ask no more: the PDCluster is gone, or asks something else now.

        Returns the question under way, which is cancelled.
        """
        asking = self._asking
        if asking is not None:
            asking.cancel()
        self._question, self._asking, self._has_answer = None, None, False
        return asking

    def repeat(self) -> None:
        """Ask again; what is still being asked is not asked twice."""
        if self._question is not None:
            self._begin(self._question)

    async def _first_answer(self, question: Question) -> None:
        task = self._begin(question)
        if not self.slots.locked():
            async with self.slots:
                await asyncio.wait({task}, timeout=FIRST_ANSWER_TIMEOUT_SECONDS)

    def _begin(self, question: Question) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(question), name="etcd")
        return self._asking

    async def _ask(self, question: Question) -> None:
        error = await self._answer(question)
        if self._has_answer and self._error == error:
            return
        self._has_answer, self._error = True, error
        logger.info("etcd changed endpoints=%s error=%s", ",".join(question.endpoints), error)
        self.enqueue()

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
