"""Verifications of one PDCluster's KV transfers: asked of its workers, and kept for the next plan.
A pair that is busy or does not answer is asked again later; only outcomes are in the status.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdcluster_api.apiserver.observe import Live, ready_workers
from pdcluster_api.certificates.authority import CA_CERTIFICATES, CERTIFICATE, KEY, StoredSecret
from pdcluster_api.discovery.verifier import (
    ClientCertificate,
    NoOutcome,
    VerificationRequest,
    Verifier,
    verification_requests,
)
from pdcluster_api.manifests.objects import child_names
from pdcluster_api.plan.observed.state import PairVerification, PairVerifications
from pdcluster_api.plan.result import DueVerification
from pdcluster_schema.backoff import Backoff
from pdcluster_schema.ports import GRPC_PORT, join_address
from pdcluster_schema.workload import PoolPair

logger = logging.getLogger(__name__)

# Between two questions to a pair that is busy: none of them costs the model anything
BUSY_SECONDS = 300.0

# Between two questions to a pair of which no worker answers
RETRY = Backoff(first=15.0, most=600.0)


@dataclass(frozen=True)
class VerificationContext:
    verifier: Verifier
    port: int = GRPC_PORT  # of the workers
    clock: Callable[[], float] = time.monotonic  # seconds that never jump


@dataclass
class _Pause:
    """A pair that gave no outcome.  until: when it is asked again; num_failures: in a row."""

    due: DueVerification
    why: str
    until: float
    num_failures: int


@dataclass
class VerificationRunner:
    shared: VerificationContext
    enqueue: Callable[[], None]  # enqueues it
    has_outcome: bool = False  # an answer has come that no plan has seen
    _ended: dict[PoolPair, PairVerification] = field(default_factory=dict)
    _pauses: dict[PoolPair, _Pause] = field(default_factory=dict)
    _tasks: dict[PoolPair, asyncio.Task[None]] = field(default_factory=dict)

    def observed(self) -> PairVerifications:
        """Everything that is known since the operator began."""
        self.has_outcome = False
        waits = {pair: pause.why for pair, pause in self._pauses.items()}
        return PairVerifications(dict(self._ended), waits)

    def verify(self, due: Iterable[DueVerification], live: Live) -> float | None:
        """Begin with every due pair that is not asked already.  Returns the seconds until a pair
        that gave no outcome may be asked again; None = none did. One that is being asked enqueues
        the PDCluster when it is answered.
        """
        due_by_pair = {each.pair: each for each in due}
        self._pauses = {pair: each for pair, each in self._pauses.items() if pair in due_by_pair}
        for pair, each in due_by_pair.items():
            if pair not in self._tasks and self._is_time(each):
                # here: a task that waits for its turn is not to keep all bodies of the children
                requests = _requests(each, live, self.shared.port)
                self._tasks[pair] = asyncio.create_task(
                    self._verify(each, requests), name=f"verify {pair}"
                )
        now = self.shared.clock()
        pauses = [each for pair, each in self._pauses.items() if pair not in self._tasks]
        return min((max(0.0, each.until - now) for each in pauses), default=None)

    def stop(self) -> list[asyncio.Task[None]]:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        return tasks

    def _is_time(self, due: DueVerification) -> bool:
        pause = self._pauses.get(due.pair)
        if pause is None:
            return True
        before = pause.due
        is_new = (before.request, before.revision) != (due.request, due.revision)
        is_urgent = due.even_if_busy and not before.even_if_busy
        return is_new or is_urgent or self.shared.clock() >= pause.until

    async def _verify(self, due: DueVerification, requests: list[VerificationRequest]) -> None:
        found: PairVerification | NoOutcome
        try:
            found = await self.shared.verifier.verify_any(requests)
        except Exception:
            logger.exception("verification failed pair=%s", due.pair)
            found = NoOutcome("the operator failed to ask; its log says more")
        finally:
            del self._tasks[due.pair]
        if isinstance(found, NoOutcome):
            self._pause(due, found)
        else:
            self._pauses.pop(due.pair, None)
            self._ended[due.pair] = found
        self.has_outcome = True
        self.enqueue()

    def _pause(self, due: DueVerification, found: NoOutcome) -> None:
        before = self._pauses.get(due.pair)
        num_failures = 0 if found.is_busy else 1 + (before.num_failures if before else 0)
        seconds = BUSY_SECONDS if found.is_busy else RETRY.after(num_failures)
        until = self.shared.clock() + seconds
        self._pauses[due.pair] = _Pause(due, found.reason, until, num_failures)
        logger.info(
            "not verified prefill=%s decode=%s seconds=%.0f reason=%s",
            *(due.pair.prefill, due.pair.decode, seconds, found.reason),
        )


def _requests(due: DueVerification, live: Live, port: int) -> list[VerificationRequest]:
    certificate = _certificate(live)
    if certificate is None:
        return []
    addresses = {
        str(pod["metadata"]["name"]): join_address(str(ip), port)
        for _, pod in ready_workers(live, due.revision)
        if (ip := pod["status"].get("podIP"))
    }
    return verification_requests(due, addresses, certificate)


def _certificate(live: Live) -> ClientCertificate | None:
    """The one that workers mount; None = there is none yet."""
    secret = StoredSecret.of(live.own("Secret").get(child_names(live.key.name).certificates))
    data = {} if secret is None else secret.data
    ca, certificate, key = (data.get(name, b"") for name in (CA_CERTIFICATES, CERTIFICATE, KEY))
    return ClientCertificate(ca, certificate, key) if ca and certificate and key else None
