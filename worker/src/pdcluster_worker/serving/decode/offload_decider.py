"""Gathers the inputs of the offload decision, and measures its outcomes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import reads_kv
from pdcluster_worker.routing.inflight_prefix_index import InflightPrefix
from pdcluster_worker.routing.offload import (
    OffloadDecision,
    OffloadFacts,
    decide,
    length_threshold,
    takes_length,
)
from pdcluster_worker.routing.qos.load_shedding import offloads_at_once, tier_of
from pdcluster_worker.routing.ttft import Side, SloFeedback, TtftEstimates
from pdcluster_worker.serving.decode.inflight_prefixes import InflightPrefixes
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import add_event


class OffloadDecider:
    """One per decode worker."""

    def __init__(
        self,
        worker: WorkerContext,
        prefills: Callable[[], list[Peer]],
        decodes: Callable[[], list[Peer]],
    ) -> None:
        self._worker = worker
        self._prefills = prefills
        self._decodes = decodes
        self.prefixes = InflightPrefixes(worker)
        self._feedback = SloFeedback()
        self._costs = TtftEstimates()

    def goes(
        self,
        place: RequestHandle,
        spec: RequestSpec,
        hashes: Sequence[bytes],
        num_decoding: int,
        pace: "RequestTimer",
    ) -> bool:
        """Decide for a prefill worker; a long prompt that stays is counted."""
        policy = self._worker.policy.offload
        num_tokens = len(spec.prompt) + len(spec.output)
        able = self._able(num_tokens)
        others = self._prefill_queue_tokens(able)
        facts = self._known(self._facts(place, spec, hashes, able, num_decoding), others, len(able))
        pace.uncached_tokens, pace.others, pace.num_workers = (
            facts.uncached_tokens,
            others,
            len(able),
        )
        threshold = self.threshold(facts.uncached_tokens)
        tier = tier_of(spec.priority)
        if offloads_at_once(self._worker.policy, tier, facts.uncached_tokens):
            verdict = OffloadDecision(is_remote=True, reason="high_priority")
        else:
            verdict = decide(policy, facts, threshold)
            if (
                policy.policy == "measured"
                and able
                and facts.uncached_tokens >= policy.min_offload_length
            ):
                verdict = self._costs.or_probe(verdict, asyncio.get_running_loop().time())
        is_remote = verdict.is_remote and bool(able)
        add_event(
            "offload",
            prefill="remote" if is_remote else "local",
            reason=verdict.reason if able else "no_prefill_worker",
            policy=policy.policy,
            threshold=threshold,
            uncached_tokens=facts.uncached_tokens,
            prefill_queue=facts.prefill_queue,
            decode_active=num_decoding,
            decode_ratio=facts.decode_ratio,
            transfer_seconds=facts.transfer_seconds,
            local_seconds=facts.local_seconds,
            remote_seconds=facts.remote_seconds,
        )
        is_kept = not is_remote and self._worker.role == "decode"
        if is_kept and decide(policy, facts.when_idle, threshold).is_remote:
            self._worker.count_long_prompt(is_remote=False)
        return is_remote

    async def prefix(
        self,
        place: RequestHandle,
        spec: RequestSpec,
        hashes: Sequence[bytes],
        num_decoding: Callable[[], int],
    ) -> float:
        """Wait for KV on its way here if the prompt would then stay; returns the seconds."""
        return await self.prefixes.wait(
            spec, lambda: self._awaited(place, spec, hashes, num_decoding())
        )

    def _awaited(
        self, place: RequestHandle, spec: RequestSpec, hashes: Sequence[bytes], num_decoding: int
    ) -> InflightPrefix | None:
        """The request on its way that a prompt waits for; None = it does not wait."""
        able = self._able(len(spec.prompt) + len(spec.output))
        found = self.prefixes.coming(place, spec, hashes)
        if found is None or not able:
            return None
        coming, brought = found
        now = self._facts(place, spec, hashes, able, num_decoding)
        if offloads_at_once(self._worker.policy, tier_of(spec.priority), now.uncached_tokens):
            return None
        then = replace(now, cached_tokens=max(now.cached_tokens, brought))
        others = self._prefill_queue_tokens(able)
        goes_now, goes_then = (
            self._sends(self._known(facts, others, len(able))) for facts in (now, then)
        )
        return coming if goes_now and not goes_then else None

    def reads_kv(
        self, place: RequestHandle, spec: RequestSpec, hashes: Sequence[bytes], holder: Peer
    ) -> bool:
        """Return whether a request that moved here reads its KV from the worker that it left."""
        if not place.engine.facts.transport:
            return False
        num_tokens = len(spec.prompt) + len(spec.output)
        uncached_tokens = num_tokens - self._worker.engines.cached_tokens(
            place.engine, hashes, num_tokens
        )
        most = self._worker.policy.offload.max_transfer_milliseconds / 1000
        is_slow = most > 0 and self._worker.transfer_seconds(holder.key, uncached_tokens) > most
        return reads_kv(uncached_tokens) and not is_slow

    def _sends(self, facts: OffloadFacts) -> bool:
        """Return whether the policy sends it away now; a waiting prompt is no probe."""
        policy = self._worker.policy.offload
        threshold = length_threshold(policy, self._worker.gpu)
        if policy.policy == "sloFeedback":
            now = asyncio.get_running_loop().time()
            threshold = self._feedback.threshold(policy.slo_feedback, threshold, now)
        return decide(policy, facts, threshold).is_remote

    def threshold(self, uncached_tokens: int) -> int:
        """The length threshold for a prompt with so many uncached tokens."""
        policy, now = self._worker.policy.offload, asyncio.get_running_loop().time()
        configured = length_threshold(policy, self._worker.gpu)
        if policy.policy != "sloFeedback":
            return configured
        return self._feedback.threshold_for(uncached_tokens, policy.slo_feedback, configured, now)

    def pace(self, request_id: str, num_tokens: int) -> "RequestTimer":
        """Begin to measure a request; num_tokens: that are to be prefilled."""
        return RequestTimer(
            self._feedback, self._costs, request_id, num_tokens, asyncio.get_running_loop().time
        )

    def _able(self, num_tokens: int) -> list[Peer]:
        return [peer for peer in self._prefills() if takes_length(peer.max_model_len, num_tokens)]

    def _known(self, facts: OffloadFacts, others: int, num_workers: int) -> OffloadFacts:
        """The facts with what both sides are expected to take; see `TtftEstimates.seconds`."""
        now = asyncio.get_running_loop().time()
        return self._costs.known(facts, now, others=others, num_workers=num_workers)

    def _facts(
        self,
        place: RequestHandle,
        spec: RequestSpec,
        hashes: Sequence[bytes],
        able: list[Peer],
        num_decoding: int,
    ) -> OffloadFacts:
        worker, engine = self._worker, place.engine
        num_tokens = len(spec.prompt) + len(spec.output)
        cached_tokens = max(
            worker.engines.cached_tokens(engine, hashes, num_tokens),
            self.prefixes.local_tokens(place, spec, hashes),
        )
        to_move = max(0, num_tokens - cached_tokens)
        stats = engine.client.stats
        return OffloadFacts(
            prompt_tokens=num_tokens,
            cached_tokens=cached_tokens,
            prefill_queue=self._prefill_queue(able),
            decode_active=num_decoding,
            decode_ratio=0.0 if stats is None else 1 - stats.free_blocks / engine.facts.num_blocks,
            transfer_seconds=min(
                (worker.transfer_seconds(peer.key, to_move) for peer in able), default=0.0
            ),
        )

    def _prefill_queue_tokens(self, prefills: list[Peer]) -> int:
        at_prefill = sum(
            max(peer.load.credit_tokens, peer.load.waiting_tokens) for peer in prefills
        )
        elsewhere = sum(peer.load.credit_queue_tokens for peer in self._decodes())
        return at_prefill + elsewhere + self._worker.load().credit_queue_tokens

    def _prefill_queue(self, prefills: list[Peer]) -> int:
        elsewhere = sum(peer.load.credit_queue_requests for peer in self._decodes())
        local_queue = self._worker.load().credit_queue_requests
        return local_queue + elsewhere + sum(peer.load.num_waiting for peer in prefills)


class RequestTimer:
    """Timing of one request, token by token: input of `sloFeedback` and `measured`."""

    def __init__(
        self,
        feedback: SloFeedback,
        costs: TtftEstimates,
        request_id: str,
        num_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        # Where its prompt was sent; its time is that side's, also where a prefill worker failed and
        # the prompt was computed here.  None = its KV is read, and its time says nothing of either
        # side.
        self.side: Side | None = "local"
        self.uncached_tokens = num_tokens  # of its prompt, as far as is known
        self.others, self.num_workers = 0, 1
        self._feedback, self._costs, self._clock = feedback, costs, clock
        self._request_id, self._num_tokens = request_id, num_tokens
        self._began = clock()
        self._first_at = 0.0
        self._count = 0

    def sent(self, side: Side) -> None:
        """Its prompt waits there from now on; what it waited for before is not that side's time."""
        self.side = side
        self._began = self._clock()
        others, num_workers = (self.others, self.num_workers) if side == "remote" else (0, 1)
        self._costs.sent(
            side,
            self._request_id,
            self.uncached_tokens,
            self._clock(),
            others=others,
            num_workers=num_workers,
        )

    def ended(self) -> None:
        self._costs.ended(self._request_id)

    def token(self, generated: Generated) -> None:
        """Take the next token."""
        if self.side is None:
            return
        self._count += 1
        token = generated.token
        if generated.prefill is not None:
            self._first_at = now = self._clock()
            uncached = self._num_tokens - token.cached_tokens
            self._feedback.first_token(self.side, uncached, now - self._began, now)
            took = token.prefill_seconds if generated.prefill == self.side else None
            self._costs.first_token(self.side, self._request_id, uncached, took, now)
        if token.finish_reason is not None and self._count > 1:
            now = self._clock()
            self._feedback.finished((now - self._first_at) / (self._count - 1), now)
