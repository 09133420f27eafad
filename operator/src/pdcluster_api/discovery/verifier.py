"""Asks decode workers to verify a KV transfer: POST /verify, over plain HTTP, with a proof.

It reads one answer of bounded size, and never fails because of a worker: whatever one does
otherwise is a NoOutcome with the reason.  The proof is an HMAC under the private key of the
cluster's certificate, which the operator and its workers alone hold, of what is asked and of a
challenge that the worker gives for this one call (docs/contracts.md).
"""

import asyncio
import hashlib
import hmac
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import aiohttp
from yarl import URL

from pdcluster_api.plan.observed.state import PairVerification
from pdcluster_api.plan.result import DueVerification
from pdcluster_schema.text import one_line

_PATH = "/verify"
_CHALLENGE = re.compile(r"PDCluster challenge=([0-9a-f.]{16,256})")
_UNAUTHORIZED = 401
_MAX_BYTES = 16 * 1024
_MAX_TEXT = 400
_MOST = 2**53
TOTAL_SECONDS = 150.0
"""A worker gives each of two runs a minute, and ten seconds to a peer that connects."""

CONNECT_SECONDS = 2.0
MAX_CONCURRENT = 64
"""Verifications at one time, over all PDClusters: they are waited for, not computed here."""

MAX_TRIES = 4
"""Decode workers of a pool that are asked in turn, while those before are busy or do not answer."""


@dataclass(frozen=True)
class VerificationRequest:
    """One pair, asked of one worker.

    address:           host:port of its HTTP listener
    key:               the bytes of tls.key
    revision, request: of the outcome; see `PairVerification`
    """

    pod: str
    address: str
    key: bytes
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
    """An async context manager: leaving it closes every connection.  now: in UTC."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=TOTAL_SECONDS, connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

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
                status, body = await self._post(request)
            except TimeoutError:
                return NoOutcome(f"{request.pod} has not answered in time")
            except (aiohttp.ClientError, OSError, ValueError) as e:
                error_text = one_line(str(e), _MAX_TEXT) or type(e).__name__
                return NoOutcome(f"{request.pod} cannot be asked: {error_text}")
        if status == 404:
            return NoOutcome(f"{request.pod} is of an image that verifies no transfers")
        if status != 200:
            return NoOutcome(f"{request.pod} answered with status {status}")
        try:
            at = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
            return read_outcome(json.loads(body), request, at)
        except (ValueError, TypeError, KeyError, OverflowError):
            return NoOutcome(f"the answer of {request.pod} cannot be read")

    async def _post(self, request: VerificationRequest) -> tuple[int, bytes]:
        """Post it without a proof, and then with one of the challenge that came back."""
        status, body, challenge = await self._posted(request, {})
        if status != _UNAUTHORIZED or challenge is None:
            return status, body
        bearer = f"Bearer {challenge}:{proof(request, challenge)}"
        status, body, _ = await self._posted(request, {"Authorization": bearer})
        return status, body

    async def _posted(
        self, request: VerificationRequest, headers: Mapping[str, str]
    ) -> tuple[int, bytes, str | None]:
        url = URL(f"http://{request.address}{_PATH}").with_query(_query(request))
        async with self._session.post(url, headers=headers, allow_redirects=False) as outcome:
            body = bytearray()
            async for chunk in outcome.content.iter_any():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"its answer has more than {_MAX_BYTES} bytes")
            offered = _CHALLENGE.fullmatch(outcome.headers.get("WWW-Authenticate", ""))
            return outcome.status, bytes(body), offered and offered[1]


def verification_requests(
    due: DueVerification, addresses: Mapping[str, str], key: bytes
) -> list[VerificationRequest]:
    """Questions to those workers of a pair that have an address; see `VerificationRequest`."""
    return [
        VerificationRequest(
            pod,
            addresses[pod],
            key,
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


def proof(request: VerificationRequest, challenge: str) -> str:
    """Proof for one call of one worker."""
    parameters = f"{request.prefill_pool} {str(request.even_if_busy).lower()} {challenge}"
    purpose = f"verify {request.pod} {parameters}"
    return hmac.new(request.key, purpose.encode(), hashlib.sha256).hexdigest()


def _query(request: VerificationRequest) -> dict[str, str]:
    query = {"prefill_pool": request.prefill_pool}
    return query | ({"even_if_busy": "true"} if request.even_if_busy else {})


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
