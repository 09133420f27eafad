"""Whether given etcd endpoints answer, asked in the background and remembered, so that no reconcile waits for a dead one.

Clusters with the same endpoints and TLS share one question.  A PDCluster is
made due when the answer about its etcd changes.  An etcd that is run for a
cluster is not asked here: its pods' readiness says the same.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pdcluster_operator.api.sections import EtcdSpec
from pdcluster_operator.cluster.cache import Key

logger = logging.getLogger(__name__)
ASK_EVERY_SECONDS = 15.0
FIRST_ANSWER_SECONDS = 4.0
"""How long the first reconcile of a cluster waits for an answer, so that its first status need not be corrected."""

NOT_YET = "has not answered yet"


@dataclass(frozen=True)
class Question:
    """namespace: of the TLS Secret; empty without one, so that clusters everywhere share the question."""

    endpoints: tuple[str, ...]
    namespace: str = ""
    tls_secret: str | None = None

    @classmethod
    def about(cls, etcd: EtcdSpec, namespace: str) -> "Question":
        """The question that a PDCluster's section asks."""
        return cls(etcd.endpoints, namespace if etcd.tls_secret else "", etcd.tls_secret)


@dataclass
class Discovery:
    """The questions of all clusters and their last answers.

    ask: returns why the etcd cannot be used, None = it answers; raises nothing
    add: makes a key due
    """

    ask: Callable[[Question], Awaitable[str | None]]
    add: Callable[[Key], None]
    _askers: dict[Question, set[Key]] = field(default_factory=dict)
    _answers: dict[Question, str | None] = field(default_factory=dict)

    async def error(self, key: Key, question: Question) -> str | None:
        """Why the etcd cannot be used, as last known; None = it answers."""
        if key not in self._askers.get(question, ()):
            self.forget(key)
            self._askers.setdefault(question, set()).add(key)
        if question not in self._answers:
            try:
                async with asyncio.timeout(FIRST_ANSWER_SECONDS):
                    await self._ask(question)
            except TimeoutError:
                return f"etcd at {', '.join(question.endpoints)} {NOT_YET}"
        return self._answers.get(question)

    def forget(self, key: Key) -> None:
        """A PDCluster is gone, or asks something else now."""
        for question, keys in list(self._askers.items()):
            keys.discard(key)
            if not keys:
                del self._askers[question]
                self._answers.pop(question, None)

    async def run(self) -> None:
        """Ask everything again and again."""
        while True:
            await asyncio.sleep(ASK_EVERY_SECONDS)
            await asyncio.gather(*(self._ask(question) for question in list(self._askers)))

    async def _ask(self, question: Question) -> None:
        answer = await self.ask(question)
        changed = question not in self._answers or self._answers[question] != answer
        if question in self._askers:
            self._answers[question] = answer
        if changed:
            logger.info("etcd changed endpoints=%s error=%s", ",".join(question.endpoints), answer)
            for key in self._askers.get(question, ()):
                self.add(key)
