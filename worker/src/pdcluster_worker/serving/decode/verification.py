"""Verifies that KV really moves from a prefill pool to this decode worker."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.peers import Fault, VerificationResult, VerifyCall
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.same_tokens import first_difference, tie_of
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.decode.verification_runs import (
    NoBlocksError,
    RemoteRun,
    VerificationRuns,
)
from pdcluster_worker.serving.worker_context import WorkerContext

logger = logging.getLogger(__name__)

RUN_SECONDS = 60.0
"""For each of the two runs; a CPU that computes slowly takes some seconds."""

CONNECT_SECONDS = 10.0
"""For a prefill worker that has just become ready to be connected here."""

_POLL_SECONDS = 0.1


class _PostponedError(Exception):
    """Nothing is to be sent now; the message says why."""


class _FailedError(Exception):
    """The pair does not pass; the message says why."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class TransferVerification:
    """One per decode worker."""

    def __init__(
        self,
        pod: str,
        worker: WorkerContext,
        broker: CreditBroker,
        prefills: Callable[[], Sequence[Peer]],
        refused: Callable[[], Mapping[str, str]],
    ) -> None:
        self._pod = pod
        self._worker = worker
        self._runs = VerificationRuns(worker, broker)
        self._prefills = prefills
        self._refused = refused
        self._is_running = False

    async def run(self, call: VerifyCall) -> VerificationResult:
        """Verify one pair of workers: this one, and one of that prefill pool."""
        pool = call.prefill_pool
        if call.pod != self._pod:
            raise RequestError(f"this worker is {self._pod}, not {call.pod}", status=404)
        if self._is_running:
            return self._postponed("another verification runs here")
        self._is_running = True
        try:
            found = await self._run(pool, even_if_busy=call.even_if_busy)
        finally:
            self._is_running = False
        self._worker.metrics.kv_verifications.labels(found.outcome).inc()
        logger.info(
            "verified transfer pool=%s prefill=%s outcome=%s fault=%s bytes=%d transport=%s: %s",
            *(pool, found.prefill, found.outcome, found.fault),
            *(found.num_bytes, found.transport, found.message),
        )
        return found

    async def _run(self, pool: str, *, even_if_busy: bool) -> VerificationResult:
        peer: Peer | None = None
        try:
            if not self._worker.takes_new:
                raise _PostponedError(str(self._worker.refusal()))
            peer = await self._chosen(pool, even_if_busy=even_if_busy)
            with self._worker.request():
                return await self._verified(peer)
        except _PostponedError as e:
            return self._postponed(str(e))
        except _FailedError as e:
            prefill = "" if peer is None else peer.key
            return VerificationResult(
                "failed", self._pod, prefill, fault=e.fault, message=one_line(e)
            )

    def _postponed(self, why: str) -> VerificationResult:
        return VerificationResult("postponed", self._pod, message=one_line(why))

    async def _chosen(self, pool: str, *, even_if_busy: bool) -> Peer:
        """A worker of the pool: any that has no request, so that in time all have their turn."""
        able = await self._connected(pool)
        if even_if_busy:
            return random.choice(able)
        if self._worker.active or self._worker.load().num_requests:
            raise _PostponedError(f"{self._pod} has other requests")
        idle = [peer for peer in able if not peer.load.num_requests]
        if not idle:
            raise _PostponedError(f"every worker of prefill pool {pool} has other requests")
        return random.choice(idle)

    async def _connected(self, pool: str) -> list[Peer]:
        deadline = asyncio.get_running_loop().time() + CONNECT_SECONDS
        while True:
            peers = [peer for peer in self._prefills() if peer.record.pool == pool]
            reasons = self._refused()
            if refused := sorted(peer.key for peer in peers if peer.key in reasons):
                pod = refused[0]
                raise _FailedError("pair_refused", f"{pod} is refused: {reasons[pod]}")
            if able := [peer for peer in peers if peer.ready]:
                return able
            if asyncio.get_running_loop().time() >= deadline:
                seen = ", ".join(f"{peer.key} is {peer.state}" for peer in peers)
                message = (
                    f"no worker of prefill pool {pool} can be used from {self._pod} "
                    f"({seen or 'none is registered'}): see whether port 9000 is open between them"
                )
                raise _FailedError("not_connected", message)
            await asyncio.sleep(_POLL_SECONDS)

    async def _verified(self, peer: Peer) -> VerificationResult:
        prompt = self._runs.prompt(peer)
        try:
            async with asyncio.timeout(RUN_SECONDS):
                remote = await self._runs.remote(peer, prompt)
            async with asyncio.timeout(RUN_SECONDS):
                local = await self._runs.local(prompt)
        except NoBlocksError as e:
            raise _PostponedError(f"{self._pod} is full: {e}") from e
        except TimeoutError as e:
            raise _FailedError("transfer_failed", f"no end within {RUN_SECONDS:.0f} s") from e
        except (PeerError, RequestError) as e:
            raise _FailedError("transfer_failed", str(e)) from e
        return self._judged(peer, len(prompt), remote, local)

    def _judged(
        self, peer: Peer, num_prompt_tokens: int, remote: RemoteRun, local: Sequence[Token]
    ) -> VerificationResult:
        done, received = remote.done, remote.received
        if done is None or received is None:
            raise _FailedError("not_used", "the engine here says nothing of KV that has arrived")
        if received.is_intact is False:
            message = f"the checksum of {received.num_blocks} blocks is not the sender's"
            raise _FailedError("damaged", message)
        if not received.num_tokens:
            message = "the KV was not used: the engine here computed the prompt again"
            raise _FailedError("not_used", message)
        facts = self._worker.engine_ready
        num_equal, differs = first_difference(local, remote.tokens, tie_of(facts.dtype))
        if differs:
            message = (
                f"token {num_equal + 1} is another one than after a local prefill, "
                f"{_token_at(remote.tokens, num_equal)} instead of {_token_at(local, num_equal)}"
            )
            raise _FailedError("tokens_differ", message)
        num_bytes = received.num_bytes or done.num_bytes
        seconds = received.seconds or done.busy_seconds or done.seconds
        return VerificationResult(
            "verified",
            self._pod,
            peer.key,
            transport=done.transport or facts.transport,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_equal,
            num_bytes=num_bytes,
            bytes_per_second=int(num_bytes / seconds) if seconds > 0 else 0,
            has_checksum=received.is_intact is True,
        )


def _token_at(tokens: Sequence[Token], index: int) -> str:
    return str(tokens[index].token_id) if index < len(tokens) else "none"
