"""The two runs of a verification: one prompt, prefilled by a worker of a pool and by this one."""

import random
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pdcluster_worker.errors import PeerError, RequestError, WorkerError
from pdcluster_worker.messages.engine import (
    Fetch,
    FetchFailed,
    PrefillDone,
    Received,
    ReceiveDone,
    ReceiveReady,
    ReceiveRefused,
    Submit,
)
from pdcluster_worker.messages.requests import SALT_BYTES, RequestSpec, SamplingParams, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.qos.load_shedding import PRIORITIES
from pdcluster_worker.serving.decode.broker import CreditBroker
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.worker_context import WorkerContext

PROMPT_TOKENS = 256
"""A short prompt, whose KV is some MiB: enough to tell one kind of network from another."""

NEW_TOKENS = 8
_TOP = 5


class NoBlocksError(WorkerError):
    """The engine here has no free KV blocks."""


@dataclass(slots=True)
class RemoteRun:
    """Tokens and reports of a remote run, as far as it came."""

    tokens: list[Token] = field(default_factory=list)
    done: PrefillDone | None = None
    received: Received | None = None


class VerificationRuns:
    """Both runs of one decode worker."""

    def __init__(self, worker: WorkerContext, broker: CreditBroker) -> None:
        self._worker = worker
        self._broker = broker

    async def remote(self, peer: Peer, prompt: Sequence[int]) -> RemoteRun:
        """Prefill there, decode here.  Raises PeerError, RequestError, NoBlocksError."""
        spec, remote = _spec(prompt), RemoteRun()
        place = self._worker.engines.open(spec.request_id, list)
        try:
            await self._credit(peer, spec)
            blocks = await self._blocks(place, spec)
            async with aclosing(peer.prefill(spec, place.target(blocks))) as replies:
                async for reply in replies:
                    if isinstance(reply, PrefillDone):
                        remote.done = reply
                    else:
                        remote.tokens.append(reply)
            done = remote.done
            if done is not None and done.handle:
                place.send(Fetch(spec.request_id, blocks.epoch, done.handle))
            elif done is None or not remote.tokens:
                raise PeerError(f"{peer.key} sent no first token or no KV")
            else:
                first = remote.tokens[0]
                place.send(ReceiveDone(spec.request_id, blocks.epoch, first, done.checksum))
            await self._rest(place, remote)
            return remote
        finally:
            peer.release(spec.request_id)  # nothing is left of a credit that was used
            place.close()

    async def _credit(self, peer: Peer, spec: RequestSpec) -> None:
        queue, num_tokens = self._worker.credit_queue, len(spec.prompt)
        queue.add(spec.request_id, num_tokens, spec.priority, peer.key)
        try:
            granted = await self._broker.acquire(
                spec.request_id, num_tokens, spec.priority, [], only=peer
            )
        finally:
            queue.discard(spec.request_id)
            self._broker.request_credits()
        if granted is None:
            raise PeerError(f"{peer.key} takes no new requests")

    async def _blocks(self, place: RequestHandle, spec: RequestSpec) -> ReceiveReady:
        answer = await place.receive(spec)
        if isinstance(answer, ReceiveRefused):
            raise NoBlocksError(f"{answer.needed_blocks} free KV blocks are needed")
        return answer

    async def _rest(self, place: RequestHandle, remote: RemoteRun) -> None:
        while not remote.tokens or remote.tokens[-1].finish_reason is None:
            output = await place.mailbox.get()
            if isinstance(output, Received):
                remote.received = output
            elif isinstance(output, Token):
                remote.tokens.append(output)
            elif isinstance(output, FetchFailed):
                raise PeerError(f"the KV did not come: {output.reason}")
            else:
                raise RequestError(f"the engine answered {type(output).__name__}", status=500)

    async def local(self, prompt: Sequence[int]) -> list[Token]:
        """Prefill and decode here.  Raises RequestError."""
        spec = _spec(prompt)
        place = self._worker.engines.open(spec.request_id, list)
        tokens: list[Token] = []
        try:
            place.send(Submit(spec))
            while not tokens or tokens[-1].finish_reason is None:
                tokens.append(await place.mailbox.token())
        finally:
            place.close()
        return tokens

    def prompt(self, peer: Peer) -> list[int]:
        """Random tokens, as many as both workers take."""
        facts = self._worker.engine_ready
        longest = min(facts.max_model_len, peer.max_model_len or facts.max_model_len) - NEW_TOKENS
        # small pools of tests and laptops keep room for others
        max_tokens = facts.num_blocks * facts.geometry.block_size // 4
        num_tokens = max(1, min(PROMPT_TOKENS, longest, max_tokens))
        return [random.randrange(facts.vocab_size) for _ in range(num_tokens)]


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
