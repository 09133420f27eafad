"""Verifies that KV really moves from a prefill pool to this decode worker.

One prompt is run twice, prefilled by a worker of the pool and by this one; both make equal tokens.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import (
    Fetch,
    FetchFailed,
    PrefillDone,
    Received,
    ReceiveDone,
    ReceiveRefused,
    Submit,
)
from pdcluster_worker.messages.peers import Fault, VerificationResult, VerifyCall
from pdcluster_worker.messages.requests import SALT_BYTES, RequestSpec, SamplingParams, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.qos.load_shedding import PRIORITIES
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.worker_context import WorkerContext

logger = logging.getLogger(__name__)

# largest difference of log probabilities that is a near tie: ten times the 1e-3 of promise 1, since
# prefill and decode may be on different kinds of devices
TIES = {"float32": 0.01}

_COARSE_TIE = 0.5  # some units in the last of the 8 bits of a bfloat16 logit

RUN_SECONDS = 60.0
"""For each of the two runs; a CPU that computes slowly takes some seconds."""

CONNECT_SECONDS = 10.0
"""For a prefill worker that has just become ready to be connected here."""

PROMPT_TOKENS = 256
"""A short prompt, whose KV is some MiB: enough to tell one kind of network from another."""

NEW_TOKENS = 8
_FEWEST_IDS = 256  # of a model whose vocabulary is not known: each has a token for every byte
_TOP = 5
_POLL_SECONDS = 0.1


class _PostponedError(Exception):
    """Nothing is to be sent now; the message says why."""


class _FailedError(Exception):
    """The pair does not pass; the message says why."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


@dataclass(slots=True)
class VerificationRun:
    """Tokens and reports of a run, as far as it came."""

    tokens: list[Token] = field(default_factory=list)
    done: PrefillDone | None = None
    received: Received | None = None


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
        self._broker = broker
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
            peer = await self._choose(pool, even_if_busy=even_if_busy)
            with self._worker.request():
                return await self._verify(peer)
        except _PostponedError as e:
            return self._postponed(str(e))
        except _FailedError as e:
            prefill = "" if peer is None else peer.key
            return VerificationResult(
                "failed", self._pod, prefill, fault=e.fault, message=one_line(e)
            )

    def _postponed(self, why: str) -> VerificationResult:
        return VerificationResult("postponed", self._pod, message=one_line(why))

    async def _choose(self, pool: str, *, even_if_busy: bool) -> Peer:
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

    async def _verify(self, peer: Peer) -> VerificationResult:
        prompt, remote = self._prompt(peer), VerificationRun()
        within = f"within {RUN_SECONDS:.0f} s"
        try:
            async with asyncio.timeout(RUN_SECONDS):
                await self._run_remote(peer, prompt, remote)
        except TimeoutError as e:
            if remote.done is None and not remote.tokens:
                raise _PostponedError(f"{peer.key} computed no prompt {within}") from e
            raise _FailedError("transfer_failed", f"no end {within}") from e
        except (PeerError, RequestError) as e:
            raise _FailedError("transfer_failed", str(e)) from e
        try:
            async with asyncio.timeout(RUN_SECONDS):
                local = await self._run_local(prompt)
        except TimeoutError as e:
            raise _PostponedError(f"{self._pod} computed no prompt {within}") from e
        except RequestError as e:
            raise _FailedError("transfer_failed", str(e)) from e
        return self._judged(peer, len(prompt), remote, local)

    def _judged(
        self, peer: Peer, num_prompt_tokens: int, remote: VerificationRun, local: Sequence[Token]
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

    def _prompt(self, peer: Peer) -> list[int]:
        """Random tokens, as many as both workers take."""
        facts = self._worker.engine_ready
        longest = min(facts.max_model_len, peer.max_model_len or facts.max_model_len) - NEW_TOKENS
        # small pools of tests and laptops keep room for others
        max_tokens = facts.num_blocks * facts.geometry.block_size // 4
        num_tokens = max(1, min(PROMPT_TOKENS, longest, max_tokens))
        return [random.randrange(facts.vocab_size or _FEWEST_IDS) for _ in range(num_tokens)]

    async def _run_remote(self, peer: Peer, prompt: Sequence[int], remote: VerificationRun) -> None:
        """Prefill there, decode here.  Raises PeerError, RequestError, _PostponedError."""
        spec = _spec(prompt)
        handle = self._worker.engines.open(spec.request_id, list)
        try:
            with self._broker.queued(spec, peer):
                if await self._broker.acquire(spec, [], peer) is None:
                    raise _PostponedError(f"{peer.key} takes no new requests")
            blocks = await handle.receive(spec)
            if isinstance(blocks, ReceiveRefused):
                raise _PostponedError(
                    f"{self._pod} is full: {blocks.needed_blocks} free KV blocks are needed"
                )
            async with aclosing(peer.prefill(spec, handle.target(blocks))) as replies:
                async for reply in replies:
                    if isinstance(reply, PrefillDone):
                        remote.done = reply
                    else:
                        remote.tokens.append(reply)
            done = remote.done
            if done is not None and done.handle:
                handle.send(Fetch(spec.request_id, blocks.epoch, done.handle))
            elif done is None or not remote.tokens:
                raise PeerError(f"{peer.key} sent no first token or no KV")
            else:
                first = remote.tokens[0]
                handle.send(ReceiveDone(spec.request_id, blocks.epoch, first, done.checksum))
            await _take_rest(handle, remote)
        finally:
            peer.release(spec.request_id)  # nothing is left of a credit that was used
            handle.close()

    async def _run_local(self, prompt: Sequence[int]) -> list[Token]:
        """Prefill and decode here.  Raises RequestError."""
        spec, local = _spec(prompt), VerificationRun()
        handle = self._worker.engines.open(spec.request_id, list)
        try:
            handle.send(Submit(spec))
            await _take_rest(handle, local)
        finally:
            handle.close()
        return local.tokens


async def _take_rest(handle: RequestHandle, run: VerificationRun) -> None:
    """All that the engine here says of a run, until its last token."""
    while not run.tokens or run.tokens[-1].finish_reason is None:
        output = await handle.outputs.get()
        if isinstance(output, Received):
            run.received = output
        elif isinstance(output, Token):
            run.tokens.append(output)
        elif isinstance(output, FetchFailed):
            raise PeerError(f"the KV did not come: {output.reason}")
        else:
            raise RequestError(f"the engine answered {type(output).__name__}", status=500)


def _token_at(tokens: Sequence[Token], index: int) -> str:
    return str(tokens[index].token_id) if index < len(tokens) else "none"


def _spec(prompt: Sequence[int]) -> RequestSpec:
    sampling = SamplingParams(NEW_TOKENS, seed=0, temperature=0.0, logprobs=_TOP, ignore_eos=True)
    return RequestSpec(
        f"verify-{secrets.token_hex(8)}",
        list(prompt),
        sampling,
        priority=PRIORITIES["low"],
        cache_salt=secrets.token_bytes(SALT_BYTES),
        verify_transfer=True,
    )


def tie_of(dtype: str) -> float:
    return TIES.get(dtype, _COARSE_TIE)


def first_difference(
    reference: Sequence[Token], other: Sequence[Token], tie: float
) -> tuple[int, bool]:
    """(number of equal leading tokens, whether the next one is a real difference).

    The tokens of the reference carry `top_logprobs`.

    >>> a = Token("r", 1, logprob=-0.1, top_logprobs=[(1, -0.1), (2, -0.4)])
    >>> first_difference([a, a], [a, a], 0.1), first_difference([a, a], [a, Token("r", 2)], 0.1)
    ((2, False), (1, True))
    >>> first_difference([a, a], [a, Token("r", 2)], 0.5)
    (1, False)
    """
    for index, (expected, found) in enumerate(zip(reference, other, strict=False)):
        if expected.token_id != found.token_id:
            return index, not _is_tie(expected, found.token_id, tie)
    num_equal = min(len(reference), len(other))
    return num_equal, len(reference) != len(other)


def _is_tie(expected: Token, token_id: int, tie: float) -> bool:
    others = dict(expected.top_logprobs)
    if expected.logprob is None or token_id not in others:
        return False
    return expected.logprob - others[token_id] <= tie
