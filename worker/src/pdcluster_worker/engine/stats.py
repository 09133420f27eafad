"""Statistics of the engine about itself, and when they are reported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pdcluster_worker.engine.ports import Sample, StepSeconds
from pdcluster_worker.engine.prefill_delayer import DelayerCounts, PrefillDelayer
from pdcluster_worker.engine.read_ahead import ReadAhead
from pdcluster_worker.engine.receiving import Receiver
from pdcluster_worker.engine.request import Batch, EngineRequest, Finish
from pdcluster_worker.engine.scheduler.base import GrammarQueue, Scheduler
from pdcluster_worker.engine.sending import Sender
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import EngineOutput, EngineStats, EngineTotals, RequestFailed
from pdcluster_worker.messages.requests import Token

STATS_INTERVAL_SECONDS = 0.1
"""While the engine works, statistics go out at most this often."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a batch; taken before the step, because its requests move on."""

    num_requests: int  # items of the batch
    num_tokens: int  # all tokens of the batch
    num_decode_tokens: int  # those of requests past their prefill, one each and its drafts
    num_prompt_tokens: int  # those that are part of a prompt
    num_recomputed_tokens: int  # those that were computed here before, and lost to a preemption

    @classmethod
    def of(cls, batch: Batch) -> "StepWork":
        num_tokens = num_decode = num_prompt = num_recomputed = 0
        for item in batch.items:
            request = item.request
            count, start, prompt = item.num_tokens, item.start, request.num_prompt_tokens
            num_tokens += count
            if start < request.num_lost_tokens:
                num_recomputed += min(count, request.num_lost_tokens - start)
            elif item.num_known_tokens == 1 and start >= prompt:
                num_decode += count
            if start < prompt:
                num_prompt += min(count, prompt - start)
        return cls(len(batch.items), num_tokens, num_decode, num_prompt, num_recomputed)

    @property
    def size(self) -> tuple[int, int, int, int]:
        computed_first = self.num_tokens - self.num_decode_tokens - self.num_recomputed_tokens
        return self.num_requests, computed_first, self.num_decode_tokens, self.num_recomputed_tokens

    @property
    def kind(self) -> str:
        if self.num_decode_tokens == 0:
            return "prefill"
        return "decode" if self.num_decode_tokens == self.num_tokens else "mixed"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, and of its part inside the runner: in all, and by phase."""

    step: float
    model: float
    phases: StepSeconds


class Counters(EngineTotals):
    """Steps and batches begin again with each report."""

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """By position among the drafts of one request in a step."""
        for counts, count in ((self.drafted, num_drafts), (self.accepted, num_accepted)):
            counts += [0] * (num_drafts - len(counts))
            for position in range(count):
                counts[position] += 1

    def count_request(self, request: EngineRequest) -> None:
        """A prefill for a peer counts its prompt at the peer, which admitted it.  A verification is
        no request of a client: prompts that are counted keep a cluster from its sleep.
        """
        if request.target is None and not request.verify_transfer:
            self.prompt_tokens += request.num_prompt_tokens
        self.prefix_query_tokens += request.num_tokens
        self.prefix_hit_tokens += request.num_cached_tokens

    def count_step(self, work: StepWork, times: StepTimes, num_sampled: int) -> None:
        decode_seconds = times.step * work.num_decode_tokens / work.num_tokens
        self.num_steps += 1
        self.busy_seconds += times.step
        self.overhead_seconds += times.step - times.model
        self.inputs_seconds += times.phases.inputs
        self.forward_seconds += times.phases.forward
        self.sample_seconds += times.phases.sample
        self.decode_seconds += decode_seconds
        self.prefill_seconds += times.step - decode_seconds
        self.prefill_tokens += work.num_prompt_tokens
        self.generation_tokens += num_sampled
        self.steps.append((work.kind, times.step))
        self.batches.append(work.size)

    def take(self) -> dict[str, Any]:
        """All of them by name; steps and batches begin again."""
        taken = msgspec.structs.asdict(self)
        taken |= {"drafted": list(self.drafted), "accepted": list(self.accepted)}
        self.steps, self.batches = [], []
        return taken


def failure_message(request: EngineRequest, error: Exception, *, is_refusal: bool) -> RequestFailed:
    """is_refusal: whatever the status of the error."""
    name = request.request_id
    if isinstance(error, RequestError) and (is_refusal or error.status == 400):
        return RequestFailed(name, error.message, is_refusal=True, param=error.param)
    why = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
    return RequestFailed(name, f"the model failed on this request: {why}")


def token_message(
    request: EngineRequest, sample: Sample, finish: Finish | None, now: float
) -> Token:
    """The message of a sampled token, with the waits of the first that is sampled here."""
    queue_seconds = prefill_seconds = None
    if not request.has_sampled and request.scheduled_seconds is not None:
        queue_seconds = request.scheduled_seconds - request.arrival_seconds
        prefill_seconds = now - request.scheduled_seconds
    tier_read, request.tier_read = request.tier_read, None
    request.has_sampled = True
    return Token(
        request_id=request.request_id,
        token_id=sample.token_id,
        logprob=sample.logprob,
        top_logprobs=list(sample.top_logprobs),
        finish_reason=None if finish is None else finish.reason,
        stop_reason=None if finish is None else finish.stop_reason,
        cached_tokens=request.num_cached_tokens,
        queue_seconds=queue_seconds,
        prefill_seconds=prefill_seconds,
        prompt_logprobs=list(sample.prompt_logprobs),
        tier_read=tier_read,
    )


class Reporter:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        receiver: Receiver,
        sender: Sender,
        grammar_queue: GrammarQueue,
        delayer: PrefillDelayer | None,
        read_ahead: ReadAhead | None,
        failed_rows: Mapping[str, int],
        clock: Callable[[], float],
    ) -> None:
        self.counters = Counters()
        self.changed = True  # something has happened since the last statistics
        self._scheduler = scheduler
        self._receiver = receiver
        self._sender = sender
        self._grammar_queue = grammar_queue
        self._delayer = delayer
        self._read_ahead = read_ahead
        self._failed_rows = failed_rows
        self._clock = clock
        self._reported_seconds = clock()
        self._num_overdue = 0

    def report(self, *, idle: bool) -> list[EngineOutput]:
        """Messages that are due now.  idle: no step is due, so statistics are not held back."""
        events = self._scheduler.tables.pool.prefix_cache.take_events()
        outputs: list[EngineOutput] = [] if events is None else [events]
        now = self._clock()
        if not idle and now - self._reported_seconds < STATS_INTERVAL_SECONDS:
            return outputs
        num_overdue = self._receiver.num_overdue(now)
        if not self.changed and num_overdue == self._num_overdue:
            return outputs
        self._num_overdue = num_overdue
        self.changed = False
        self._reported_seconds = now
        return [*outputs, self._stats()]

    def _stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._scheduler.tables.pool
        queued = (scheduler.waiting, scheduler.ready, self._grammar_queue.waiting)
        reads = self._read_ahead
        constraints = self._grammar_queue.grammars.take_counts()
        delays = DelayerCounts() if self._delayer is None else self._delayer.take_counts()
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=sum(map(len, queued)) + (0 if reads is None else reads.num_requests),
            waiting_tokens=scheduler.num_waiting_tokens,
            num_receiving=self._receiver.num_receiving,
            blocks=pool.counts(),
            free_blocks=pool.num_available,
            fences_overdue=self._num_overdue,
            preemptions=scheduler.num_preemptions,
            bytes_sent=self._sender.num_bytes,
            bytes_received=self._receiver.num_bytes,
            num_transfers=self._sender.num_transfers + self._receiver.num_transfers,
            failed_rows=dict(self._failed_rows),
            evictions=pool.num_evictions,
            constraint_requests=list(constraints.requests.items()),
            constraint_hits=constraints.hits,
            constraint_compiles=constraints.compiles,
            delay_outcomes=[(*outcome, count) for outcome, count in delays.outcomes.items()],
            delay_waits=delays.waits,
            tiers=[] if reads is None else reads.tiers.take_stats(),
            tier_reads={} if reads is None else dict(reads.counts),
            tier_lookups={} if reads is None else dict(reads.lookups.counts),
            **self.counters.take(),
        )
