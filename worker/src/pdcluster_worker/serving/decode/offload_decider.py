"""Gathers the inputs of the offload decision of a request, and measures its outcome."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pdcluster_worker.messages.peers import Generated, PrefillMode
from pdcluster_worker.messages.requests import RequestSpec, Token
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import reads_kv
from pdcluster_worker.routing.inflight_prefix_index import (
    InflightPrefix,
    InflightPrefixIndex,
    longest_wait,
)
from pdcluster_worker.routing.offload import (
    OffloadDecision,
    OffloadFacts,
    decide,
    length_threshold,
)
from pdcluster_worker.routing.qos.load_shedding import offloads_at_once, tier_of
from pdcluster_worker.routing.ttft import Side, SloFeedback, TtftEstimates
from pdcluster_worker.serving.decode.broker import may_prefill
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.estimation import TrackedRequest
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.streams import Reader
from pdcluster_worker.tracing.request_trace import add_event

POLL_SECONDS = 1.0
"""Time after which a prompt that waits for a prefix asks again whether it still should."""


class RequestTimer:
    """Timing of one request, token by token: input of `sloFeedback` and `measured`."""

    def __init__(
        self,
        feedback: SloFeedback,
        estimates: TtftEstimates,
        request_id: str,
        num_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        # Where its prompt was sent; its time is that side's, also where a prefill worker failed and
        # the prompt was computed here.  None = its KV is read, and its time says nothing of either
        # side.
        self.side: Side | None = "local"
        self.uncached_tokens = num_tokens  # of its prompt, as far as is known
        # Tokens queued by others for prefill workers, and their number, when it was decided.
        self.others, self.num_workers = 0, 1
        self._feedback, self._estimates, self._clock = feedback, estimates, clock
        self._request_id, self._num_tokens = request_id, num_tokens
        self._start = clock()
        self._first_at = 0.0
        self._count = 0

    def sent(self, side: Side) -> None:
        """Its prompt waits there from now on; what it waited for before is not that side's time."""
        self.side, self._start = side, self._clock()
        others, num_workers = (self.others, self.num_workers) if side == "remote" else (0, 1)
        self._estimates.sent(
            *(side, self._request_id, self.uncached_tokens, self._start),
            others=others,
            num_workers=num_workers,
        )

    def ended(self) -> None:
        self._estimates.ended(self._request_id)

    def token(self, generated: Generated) -> None:
        if self.side is None:
            return
        self._count += 1
        token = generated.token
        if generated.prefill is not None:
            self._first_at = now = self._clock()
            uncached = self._num_tokens - token.cached_tokens
            self._feedback.first_token(self.side, uncached, now - self._start, now)
            took = token.prefill_seconds if generated.prefill == self.side else None
            self._estimates.first_token(self.side, self._request_id, uncached, took, now)
        if token.finish_reason is not None and self._count > 1:
            now = self._clock()
            self._feedback.finished((now - self._first_at) / (self._count - 1), now)


@dataclass(slots=True)
class DecodeRequest:
    """One request at its engine.  has_begun: it has its first token; has_ended: its last one."""

    spec: RequestSpec
    prefill: PrefillMode
    handle: RequestHandle
    timer: RequestTimer
    tracked: TrackedRequest
    hashes: Sequence[bytes] = ()  # of its blocks, once they are needed
    reader: Reader[Token] | None = None  # of the tokens between first and last
    waited_seconds: float = 0.0  # for KV that others brought
    has_begun: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Facts of one decision, as it would be with the KV that is cached here."""

    facts: OffloadFacts
    num_workers: int  # prefill workers that take a prompt of that length
    others: int  # tokens queued for them

    @property
    def uncached_tokens(self) -> int:
        return self.facts.uncached_tokens


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
        self._clock = time.monotonic
        self.prefixes = InflightPrefixes(worker)
        self._feedback = SloFeedback()
        self._estimates = TtftEstimates()

    def timer(self, spec: RequestSpec) -> RequestTimer:
        return RequestTimer(
            self._feedback, self._estimates, spec.request_id, spec.num_tokens, self._clock
        )

    def goes(self, request: DecodeRequest, num_decoding: int) -> bool:
        """Decide for a prefill worker; a long prompt that stays is counted."""
        policy = self._worker.policy.offload
        inputs = self._inputs(request, num_decoding)
        facts, timer = inputs.facts, request.timer
        timer.uncached_tokens = facts.uncached_tokens
        timer.others, timer.num_workers = inputs.others, inputs.num_workers
        threshold = self.threshold(facts.uncached_tokens)
        verdict = self._decide(request, inputs, threshold)
        is_remote = verdict.is_remote and inputs.num_workers > 0
        add_event(
            "offload",
            prefill="remote" if is_remote else "local",
            reason=verdict.reason if inputs.num_workers else "no_prefill_worker",
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
        if not is_remote and decide(policy, facts.when_idle, threshold).is_remote:
            self._worker.count_long_prompt(is_remote=False)
        return is_remote

    def _decide(self, request: DecodeRequest, inputs: _Inputs, threshold: int) -> OffloadDecision:
        policy, uncached_tokens = self._worker.policy.offload, inputs.uncached_tokens
        if offloads_at_once(self._worker.policy, tier_of(request.spec.priority), uncached_tokens):
            return OffloadDecision(is_remote=True, reason="high_priority")
        verdict = decide(policy, inputs.facts, threshold)
        may_probe = policy.policy == "measured" and inputs.num_workers > 0
        if may_probe and uncached_tokens >= policy.min_offload_length:
            return self._estimates.or_probe(verdict, self._clock())
        return verdict

    async def wait_for_prefix(
        self, request: DecodeRequest, num_decoding: Callable[[], int]
    ) -> float:
        """Wait for KV on its way here if the prompt would then stay; returns the seconds."""
        return await self.prefixes.wait(
            request.spec, lambda: self._awaited(request, num_decoding())
        )

    def _awaited(self, request: DecodeRequest, num_decoding: int) -> InflightPrefix | None:
        """The request on its way that a prompt waits for; None = it does not wait."""
        found = self.prefixes.coming(request)
        if found is None:
            return None
        coming, num_tokens = found
        now = self._inputs(request, num_decoding)
        tier = tier_of(request.spec.priority)
        if not now.num_workers or offloads_at_once(self._worker.policy, tier, now.uncached_tokens):
            return None
        cached_tokens = max(now.facts.cached_tokens, num_tokens)
        then = self._known(
            replace(now.facts, cached_tokens=cached_tokens), now.others, now.num_workers
        )
        return coming if self._sends(now.facts) and not self._sends(then) else None

    def reads_kv(self, request: DecodeRequest, holder: Peer) -> bool:
        """Return whether a request that moved here reads its KV from the worker that it left."""
        engine, worker = request.handle.engine, self._worker
        if not engine.facts.transport:
            return False
        num_tokens = request.spec.num_tokens
        uncached_tokens = num_tokens - worker.engines.cached_tokens(
            engine, request.hashes, num_tokens
        )
        most = worker.policy.offload.max_transfer_milliseconds / 1000
        is_slow = most > 0 and worker.transfer_seconds(holder.key, uncached_tokens) > most
        return reads_kv(uncached_tokens) and not is_slow

    def _sends(self, facts: OffloadFacts) -> bool:
        """Return whether the policy sends it away now; a waiting prompt is no probe."""
        return decide(self._worker.policy.offload, facts, self.threshold(None)).is_remote

    def threshold(self, uncached_tokens: int | None) -> int:
        policy = self._worker.policy.offload
        configured = length_threshold(policy, self._worker.gpu)
        if policy.policy != "sloFeedback":
            return configured
        settings, now = policy.slo_feedback, self._clock()
        if uncached_tokens is None:
            return self._feedback.threshold(settings, configured, now)
        return self._feedback.threshold_for(uncached_tokens, settings, configured, now)

    def _known(self, facts: OffloadFacts, others: int, num_workers: int) -> OffloadFacts:
        """The facts with what both sides are expected to take; see `TtftEstimates.seconds`."""
        now = self._clock()
        return self._estimates.known(facts, now, others=others, num_workers=num_workers)

    def _inputs(self, request: DecodeRequest, num_decoding: int) -> _Inputs:
        worker, engine, num_tokens = self._worker, request.handle.engine, request.spec.num_tokens
        able = [peer for peer in self._prefills() if may_prefill(peer, request.spec)]
        decodes, load, stats = self._decodes(), worker.load(), engine.client.stats
        cached_tokens = max(
            worker.engines.cached_tokens(engine, request.hashes, num_tokens),
            self.prefixes.local_tokens(request),
        )
        own_blocks = cached_tokens // worker.block_size
        credited_tokens = worker.matched_blocks(request.hashes, own_blocks) * worker.block_size
        cached_tokens = max(cached_tokens, min(credited_tokens, num_tokens - 1))
        to_move = max(0, num_tokens - cached_tokens)
        facts = OffloadFacts(
            prompt_tokens=num_tokens,
            cached_tokens=cached_tokens,
            prefill_queue=load.credit_queue_requests
            + sum(peer.load.credit_queue_requests for peer in decodes)
            + sum(peer.load.num_waiting for peer in able),
            decode_active=num_decoding,
            decode_ratio=0.0 if stats is None else 1 - stats.free_blocks / engine.facts.num_blocks,
            transfer_seconds=min(
                (worker.transfer_seconds(peer.key, to_move) for peer in able), default=0.0
            ),
        )
        others = (
            load.credit_queue_tokens
            + sum(peer.load.credit_queue_tokens for peer in decodes)
            + sum(max(peer.load.credit_tokens, peer.load.waiting_tokens) for peer in able)
        )
        return _Inputs(self._known(facts, others, len(able)), len(able), others)


class InflightPrefixes:
    """Prefixes that running requests share: cached here, or on their way; one per decode worker."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker
        self._prefixes = InflightPrefixIndex()
        self._settled: dict[str, asyncio.Event] = {}  # of each prompt on its way

    def begin(self, request: DecodeRequest, *, is_local: bool) -> None:
        """A prompt is computed from now on, by this engine or for it."""
        spec, hashes = request.spec, request.hashes
        if not request.handle.engine.facts.prefix_caching or not hashes:
            return
        if not is_local:
            if spec.sampling.max_tokens == 1:
                return
            self._settled[spec.request_id] = asyncio.Event()
        self._prefixes.begin(
            spec.request_id, _key(request), hashes, priority=spec.priority, is_local=is_local
        )

    def arrived(self, request_id: str) -> None:
        """Its KV is here, or the engine computes it after all; an unknown id is a no-op."""
        self._prefixes.arrived(request_id)
        self._settle(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a request; whatever waits for it goes on.  An unknown id is a no-op."""
        self._prefixes.ended(request_id)
        self._settle(request_id)

    def local_tokens(self, request: DecodeRequest) -> int:
        spec = request.spec
        num_blocks = self._prefixes.local(_key(request), request.hashes, priority=spec.priority)
        return self._tokens(spec, num_blocks)

    def coming(self, request: DecodeRequest) -> tuple[InflightPrefix, int] | None:
        spec = request.spec
        found = self._prefixes.coming(_key(request), request.hashes, priority=spec.priority)
        return None if found is None else (found, self._tokens(spec, found.num_blocks))

    async def wait(self, spec: RequestSpec, awaited: Callable[[], InflightPrefix | None]) -> float:
        """Wait for the awaited prefix, in bounds; returns the seconds."""
        clock = asyncio.get_running_loop().time
        start, last = clock(), ""
        most = longest_wait(spec.ttft_slo_seconds, spec.deadline_seconds)
        self._worker.num_waiting_for_prefix += 1
        try:
            while (left := start + most - clock()) > 0 and (coming := awaited()) is not None:
                last = coming.request_id
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, POLL_SECONDS)):
                        await self._settled[last].wait()
        finally:
            self._worker.num_waiting_for_prefix -= 1
        if not last:
            return 0.0
        add_event("prefix", request=last, waited_seconds=clock() - start)
        return clock() - start

    def _settle(self, request_id: str) -> None:
        if (settled := self._settled.pop(request_id, None)) is not None:
            settled.set()

    def _tokens(self, spec: RequestSpec, num_blocks: int) -> int:
        """Tokens of so many blocks; at least one is left to compute, as in the engine."""
        size = self._worker.block_size
        return min(num_blocks, (spec.num_tokens - 1) // size) * size


def _key(request: DecodeRequest) -> str:
    return request.handle.engine.facts.engine_id
