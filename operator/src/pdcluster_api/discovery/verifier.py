"""Asks decode workers to verify a KV transfer: POST /verify, over plain HTTP, with a proof.

It reads one answer of bounded size, and never fails because of a worker: whatever one does
otherwise is a NoAnswer with the reason.  The proof is an HMAC under the private key of the
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

from pdcluster_api.plan.observed.verification import Verification
from pdcluster_api.plan.result import DueVerification
from pdcluster_api.text import one_line

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

MAX_ASKED = 4
"""Decode workers of a pool that are asked in turn, while those before are busy or do not answer."""


@dataclass(frozen=True)
class Question:
    """One pair, asked of one worker.

    address:           host:port of its HTTP listener
    key:               the bytes of tls.key
    revision, request: of the outcome; see `Verification`
    """

    pod: str
    address: str
    key: bytes
    prefill_pool: str
    revision: str = ""
    request: str = ""
    even_if_busy: bool = False


@dataclass(frozen=True)
class NoAnswer:
    """Nothing is known: the worker is busy, or does not answer.  is_busy: it is."""

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

    async def ask_any(self, questions: Sequence[Question]) -> Verification | NoAnswer:
        """Ask workers of one pair, chosen at random, until one of them has an outcome."""
        found: list[NoAnswer] = []
        for question in random.sample(questions, min(MAX_ASKED, len(questions))):
            answer = await self.ask(question)
            if isinstance(answer, Verification):
                return answer
            found.append(answer)
        return spoken(found)

    async def ask(self, question: Question) -> Verification | NoAnswer:
        """Verify once."""
        async with self._turns:
            try:
                status, body = await self._post(question)
            except TimeoutError:
                return NoAnswer(f"{question.pod} has not answered in time")
            except (aiohttp.ClientError, OSError, ValueError) as e:
                said = one_line(str(e), _MAX_TEXT) or type(e).__name__
                return NoAnswer(f"{question.pod} cannot be asked: {said}")
        if status == 404:
            return NoAnswer(f"{question.pod} is of an image that verifies no transfers")
        if status != 200:
            return NoAnswer(f"{question.pod} answered with status {status}")
        try:
            at = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
            return read_answer(json.loads(body), question, at)
        except (ValueError, TypeError, KeyError, OverflowError):
            return NoAnswer(f"the answer of {question.pod} cannot be read")

    async def _post(self, question: Question) -> tuple[int, bytes]:
        """Post it without a proof, and then with one of the challenge that came back."""
        status, body, challenge = await self._posted(question, {})
        if status != _UNAUTHORIZED or challenge is None:
            return status, body
        bearer = f"Bearer {challenge}:{proof(question, challenge)}"
        status, body, _ = await self._posted(question, {"Authorization": bearer})
        return status, body

    async def _posted(
        self, question: Question, headers: Mapping[str, str]
    ) -> tuple[int, bytes, str | None]:
        url = URL(f"http://{question.address}{_PATH}").with_query(_query(question))
        async with self._session.post(url, headers=headers, allow_redirects=False) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"its answer has more than {_MAX_BYTES} bytes")
            asked_for = _CHALLENGE.fullmatch(answer.headers.get("WWW-Authenticate", ""))
            return answer.status, bytes(body), asked_for and asked_for[1]


def questions_of(due: DueVerification, addresses: Mapping[str, str], key: bytes) -> list[Question]:
    """Questions to those workers of a pair that have an address; see `Question`."""
    return [
        Question(
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


def spoken(answers: Iterable[NoAnswer]) -> NoAnswer:
    """Answer of a pair none of whose workers has an outcome: that of a busy one, else the last.

    >>> spoken([NoAnswer("busy", is_busy=True), NoAnswer("gone")]).reason
    'busy'
    >>> spoken([NoAnswer("gone"), NoAnswer("slow")]).reason
    'slow'
    """
    found = NoAnswer("no decode worker of it has an address and a certificate yet")
    for answer in answers:
        if answer.is_busy or not found.is_busy:
            found = answer
    return found


def proof(question: Question, challenge: str) -> str:
    """Proof for one call of one worker."""
    asked = f"{question.prefill_pool} {str(question.even_if_busy).lower()} {challenge}"
    purpose = f"verify {question.pod} {asked}"
    return hmac.new(question.key, purpose.encode(), hashlib.sha256).hexdigest()


def _query(question: Question) -> dict[str, str]:
    query = {"prefill_pool": question.prefill_pool}
    return query | ({"even_if_busy": "true"} if question.even_if_busy else {})


def read_answer(body: Mapping[str, Any], question: Question, at: str) -> Verification | NoAnswer:
    """The outcome of an answer.  Raises what reading a wrong one raises."""
    outcome, message = body["outcome"], one_line(str(body.get("message", "")), _MAX_TEXT)
    if outcome == "postponed":
        return NoAnswer(message, is_busy=True)
    if outcome not in ("verified", "failed"):
        raise ValueError(f"outcome {outcome!r}")
    return Verification(
        question.revision,
        at,
        question.request,
        fault=None if outcome == "verified" else _text(body, "fault") or "transfer_failed",
        message=message,
        decode_worker=question.pod,
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
