"""Asks decode workers to verify a KV transfer, by their gRPC service (docs/contracts.md).

It never fails because of a worker: whatever one does otherwise is a NoOutcome with the reason.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import grpc

from pdcluster_api.plan.observed.state import PairVerification
from pdcluster_api.plan.result import DueVerification
from pdcluster_schema.ports import WORKER_NAME, WORKER_SERVICE
from pdcluster_schema.text import one_line

_MAX_TEXT = 400
_MOST = 2**53
TOTAL_SECONDS = 150.0
"""A worker gives each of two runs a minute, and ten seconds to a peer that connects."""

MAX_CONCURRENT = 64
"""Verifications at one time, over all PDClusters: they are waited for, not computed here."""

MAX_TRIES = 4
"""Decode workers of a pool that are asked in turn, while those before are busy or do not answer."""

_OPTIONS = [
    ("grpc.ssl_target_name_override", WORKER_NAME),
    ("grpc.max_receive_message_length", 16 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 2000),  # also the bound of one connection attempt
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True)
class ClientCertificate:
    """PEM: the authorities of a cluster's workers, and a certificate of it with its key."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class VerificationRequest:
    """One pair, asked of one worker.

    address:           host:port of its gRPC listener
    revision, request: of the outcome; see `PairVerification`
    """

    pod: str
    address: str
    certificate: ClientCertificate
    prefill_pool: str
    revision: str = ""
    request: str = ""
    even_if_busy: bool = False


@dataclass(frozen=True)
class NoOutcome:
    """Nothing is known: the worker is busy, or does not answer.  is_busy: which of both."""

    reason: str
    is_busy: bool = False


class Verifier:
    """now: in UTC."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)

    async def verify_any(
        self, requests: Sequence[VerificationRequest]
    ) -> PairVerification | NoOutcome:
        """Ask workers of one pair, chosen at random, until one of them has an outcome."""
        found: list[NoOutcome] = []
        for request in random.sample(requests, min(MAX_TRIES, len(requests))):
            outcome = await self.verify(request)
            if isinstance(outcome, PairVerification):
                return outcome
            found.append(outcome)
        return best_reason(found)

    async def verify(self, request: VerificationRequest) -> PairVerification | NoOutcome:
        """Verify once."""
        async with self._turns:
            try:
                answer = await _call(request)
            except grpc.aio.AioRpcError as e:
                return NoOutcome(f"{request.pod} {_why(e)}")
        try:
            at = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
            return read_outcome(json.loads(answer), request, at)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return NoOutcome(f"the answer of {request.pod} cannot be read")


async def _call(request: VerificationRequest) -> Any:
    """The answer, in bytes; None of a call that ended without one.  With the certificate that its
    workers show each other.  Raises AioRpcError.
    """
    pem = request.certificate
    credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
    call = {
        "pod": request.pod,
        "prefill_pool": request.prefill_pool,
        "even_if_busy": request.even_if_busy,
    }
    async with grpc.aio.secure_channel(request.address, credentials, _OPTIONS) as channel:
        # the annotations of grpc lack the defaults of both serializers
        verify: Any = channel.unary_unary(f"/{WORKER_SERVICE}/verify")  # type: ignore[call-arg]
        return await verify(json.dumps(call).encode(), timeout=TOTAL_SECONDS)


def _why(error: grpc.aio.AioRpcError) -> str:
    code = error.code()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "is of an image that verifies no transfers"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "has not answered in time"
    return f"cannot be asked: {code.name}: {one_line(error.details() or '', _MAX_TEXT)}"


def verification_requests(
    due: DueVerification, addresses: Mapping[str, str], certificate: ClientCertificate
) -> list[VerificationRequest]:
    """Questions to those workers of a pair that have an address; see `VerificationRequest`."""
    return [
        VerificationRequest(
            pod,
            addresses[pod],
            certificate,
            due.pair.prefill,
            due.revision,
            due.request,
            due.even_if_busy,
        )
        for pod in due.workers
        if addresses.get(pod)
    ]


def best_reason(outcomes: Iterable[NoOutcome]) -> NoOutcome:
    """Answer of a pair none of whose workers has an outcome: that of a busy one, else the last.

    >>> best_reason([NoOutcome("busy", is_busy=True), NoOutcome("gone")]).reason
    'busy'
    >>> best_reason([NoOutcome("gone"), NoOutcome("slow")]).reason
    'slow'
    """
    found = NoOutcome("no decode worker of it has an address and a certificate yet")
    for outcome in outcomes:
        if outcome.is_busy or not found.is_busy:
            found = outcome
    return found


def read_outcome(
    body: Mapping[str, Any], request: VerificationRequest, at: str
) -> PairVerification | NoOutcome:
    """The outcome of an answer.  Raises what reading a wrong one raises."""
    outcome, message = body["outcome"], one_line(str(body.get("message", "")), _MAX_TEXT)
    if outcome == "postponed":
        return NoOutcome(message, is_busy=True)
    if outcome not in ("verified", "failed"):
        raise ValueError(f"outcome {outcome!r}")
    return PairVerification(
        request.revision,
        at,
        request.request,
        fault=None if outcome == "verified" else _text(body, "fault") or "transfer_failed",
        message=message,
        decode_worker=request.pod,
        prefill_worker=_text(body, "prefill"),
        transport=_text(body, "transport"),
        num_tokens=_count(body, "num_tokens"),
        num_bytes=_count(body, "num_bytes"),
        bytes_per_second=_count(body, "bytes_per_second"),
        has_checksum=body.get("has_checksum") is True,
    )


def _text(body: Mapping[str, Any], name: str) -> str:
    return one_line(str(body.get(name, "")), 63)


def _count(body: Mapping[str, Any], name: str) -> int:
    number = int(body.get(name, 0))
    if not 0 <= number <= _MOST:
        raise ValueError(f"{name} is {number}")
    return number
