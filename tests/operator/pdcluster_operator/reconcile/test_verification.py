"""Verifications that workers are asked for: which worker, when again, and what is kept.

A real gRPC listener plays the worker.
"""

import asyncio
import base64
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.discovery.verifier import (
    ClientCertificate,
    NoOutcome,
    VerificationRequest,
    Verifier,
)
from pdcluster_api.manifests.objects import child_names
from pdcluster_api.plan.observed.state import PairVerification, PairVerifications
from pdcluster_api.plan.result import DueVerification
from pdcluster_operator.reconcile.verification import (
    BUSY_SECONDS,
    VerificationContext,
    VerificationRunner,
)
from pdcluster_schema.workload import PoolPair, WorkloadId
from tests.operator.played_worker import PASSED, PlayedWorker, new_certificate
from tests.operator.pods import worker_body

CERTIFICATE = new_certificate()
PAIR = PoolPair("big", "cpu")
REVISION = "0a1b2c3d"
DECODE = WorkloadId("chat", "decode", "cpu", REVISION)
FIRST, SECOND = f"{DECODE.name}-0", f"{DECODE.name}-1"
DUE = DueVerification(PAIR, REVISION, (FIRST,))
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
VERIFIED = PairVerification(
    REVISION,
    "2026-01-02T03:04:05Z",
    decode_worker=FIRST,
    prefill_worker="p-0",
    transport="tcp",
    num_tokens=8,
    num_bytes=1000,
    bytes_per_second=2000,
    has_checksum=True,
)


def live(num_pods: int = 1, *, secret: ClientCertificate | None = CERTIFICATE) -> Live:
    """A PDCluster of ready decode workers d-0 and so on, and its certificate."""
    body = {"kind": "PDCluster", "metadata": {"name": "chat", "namespace": "x", "uid": "u"}}
    status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    children = [worker_body(DECODE, ordinal, status=status) for ordinal in range(num_pods)]
    if secret is not None:
        owner = {"uid": "u", "kind": "PDCluster", "name": "chat", "controller": True}
        name = child_names("chat").certificates
        parts = {"ca.crt": secret.ca, "tls.crt": secret.certificate, "tls.key": secret.key}
        data = {part: base64.b64encode(content).decode() for part, content in parts.items()}
        metadata = {"name": name, "uid": name, "labels": {}, "ownerReferences": [owner]}
        children.append({"kind": "Secret", "metadata": metadata, "data": data})
    return Live(body, children)


@dataclass
class Rig:
    worker: PlayedWorker
    verification: VerificationRunner
    enqueued: asyncio.Event
    clock: list[float]

    async def verify(
        self, *due: DueVerification, observed: Live | None = None
    ) -> PairVerifications:
        """Ask, and wait until the PDCluster is enqueued."""
        self.enqueued.clear()
        self.verification.verify(due, live() if observed is None else observed)
        async with asyncio.timeout(20):
            await self.enqueued.wait()
        return self.verification.observed()


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a rig whose worker gives these answers."""
    async with AsyncExitStack() as servers:

        async def build(*answers: Any) -> Rig:
            worker = PlayedWorker(list(answers), certificate=CERTIFICATE)
            await servers.enter_async_context(worker.serving())
            clock, enqueued = [0.0], asyncio.Event()
            asking = VerificationContext(Verifier(lambda: NOW), worker.port, lambda: clock[0])
            return Rig(worker, VerificationRunner(asking, enqueued.set), enqueued, clock)

        yield build


async def test_worker_is_called_and_its_outcome_is_kept(start: Start) -> None:
    rig = await start(PASSED)

    observed = await rig.verify(DUE)

    assert observed == PairVerifications({PAIR: VERIFIED}, {})
    assert rig.worker.requested == [{"pod": FIRST, "prefill_pool": "big", "even_if_busy": False}]


async def test_request_of_the_annotation_is_kept_with_the_outcome(start: Start) -> None:
    rig = await start(PASSED)

    observed = await rig.verify(DueVerification(PAIR, REVISION, (FIRST,), "now", even_if_busy=True))

    assert observed.ended[PAIR].request == "now"
    assert rig.worker.requested[0]["even_if_busy"] is True


async def test_fault_is_an_outcome_too(start: Start) -> None:
    rig = await start({"outcome": "failed", "fault": "damaged", "message": "two\nlines"})

    found = (await rig.verify(DUE)).ended[PAIR]

    assert (found.fault, found.message) == ("damaged", "two lines")


async def test_busy_pair_is_tried_again_later_and_by_another_request_at_once(start: Start) -> None:
    busy = {"outcome": "postponed", "message": "d-0 has other requests"}
    rig = await start(busy, PASSED)

    assert await rig.verify(DUE) == PairVerifications({}, {PAIR: "d-0 has other requests"})
    assert rig.verification.verify([DUE], live()) == BUSY_SECONDS
    assert len(rig.worker.requested) == 1
    rig.clock[0] = BUSY_SECONDS
    assert (await rig.verify(DUE)).ended == {PAIR: VERIFIED}

    again = await start(busy, PASSED)
    await again.verify(DUE)
    asked_for = DueVerification(PAIR, REVISION, (FIRST,), "now", even_if_busy=True)
    assert (await again.verify(asked_for)).waits == {}


async def test_pair_that_is_being_tried_again_is_not_due_meanwhile(start: Start) -> None:
    rig = await start({"outcome": "postponed", "message": "busy"})
    await rig.verify(DUE)
    rig.clock[0] = BUSY_SECONDS

    assert rig.verification.verify([DUE], live()) is None
    assert rig.verification.verify([DUE], live()) is None


async def test_pair_that_waits_for_its_turn_keeps_no_bodies(start: Start) -> None:
    rig, observed = await start(PASSED), live()
    bodies = weakref.ref(observed)
    rig.verification.verify([DUE], observed)
    del observed

    assert bodies() is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "is of an image that verifies no transfers"),
        (grpc.StatusCode.NOT_FOUND, "cannot be asked: NOT_FOUND: why"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "has not answered in time"),
        ({"outcome": "perhaps"}, "cannot be read"),
        ({**PASSED, "num_bytes": -1}, "cannot be read"),
        (b"x" * 20_000, "cannot be asked: RESOURCE_EXHAUSTED: "),
        (b"{", "cannot be read"),
        (b"[" * 16_000, "cannot be read"),
        (None, "cannot be read"),
    ],
)
async def test_worker_that_gives_no_outcome_is_tried_again_with_back_off(
    start: Start, answer: Any, why: str
) -> None:
    rig = await start(answer)

    assert why in (await rig.verify(DUE)).waits[PAIR]
    assert rig.verification.verify([DUE], live()) == 15.0
    rig.clock[0] = 15.0
    await rig.verify(DUE)
    assert rig.verification.verify([DUE], live()) == 30.0


async def test_next_worker_of_the_pool_is_tried_where_one_is_busy(start: Start) -> None:
    busy = {"outcome": "postponed", "message": "busy"}
    rig = await start(busy, PASSED)

    observed = await rig.verify(DueVerification(PAIR, REVISION, (FIRST, SECOND)), observed=live(2))

    assert list(observed.ended) == [PAIR]
    assert len(rig.worker.requested) == 2


async def test_at_most_four_workers_of_a_pool_are_tried(start: Start) -> None:
    rig = await start({"outcome": "postponed", "message": "busy"})
    names = tuple(f"{DECODE.name}-{ordinal}" for ordinal in range(6))

    await rig.verify(DueVerification(PAIR, REVISION, names), observed=live(6))

    assert len(rig.worker.requested) == 4


@pytest.mark.parametrize(
    "observed", [live(0), live(secret=None), live(secret=replace(CERTIFICATE, key=b""))]
)
async def test_worker_without_address_or_certificate_is_not_tried(
    start: Start, observed: Live
) -> None:
    rig = await start(PASSED)

    found = await rig.verify(DUE, observed=observed)

    assert found.waits == {PAIR: "no decode worker of it has an address and a certificate yet"}
    assert rig.worker.requested == []


async def test_pair_that_is_no_longer_due_is_not_waited_for(start: Start) -> None:
    rig = await start(grpc.StatusCode.UNIMPLEMENTED)
    await rig.verify(DUE)

    assert rig.verification.verify([], live()) is None
    assert rig.verification.observed().waits == {}


async def test_worker_that_cannot_be_reached_or_has_another_authority_is_no_answer(
    start: Start,
) -> None:
    rig = await start(PASSED)
    for port, certificate in ((1, CERTIFICATE), (rig.worker.port, new_certificate())):
        request = VerificationRequest("d-0", f"127.0.0.1:{port}", certificate, "big")
        found = await Verifier(lambda: NOW).verify(request)

        assert isinstance(found, NoOutcome)
        assert found.reason.startswith("d-0 cannot be asked: UNAVAILABLE: ")
    assert rig.worker.requested == []


async def test_stop_cancels_what_is_under_way(start: Start) -> None:
    rig = await start(PASSED)
    rig.verification.verify([DUE], live())

    tasks = rig.verification.stop()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert [task.cancelled() for task in tasks] == [True]
    assert rig.verification.observed() == PairVerifications()
