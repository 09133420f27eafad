"""Statistics of the engine about itself, and the times of a request's first token here.

Counters only grow, from the engine's start.  A step's duration is split between
prefill and decode by its tokens; what it spent outside the model is overhead.
Gauges belong to the owner of the state and come in with `report`.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from pdcluster_worker.engine.batch import Batch
from pdcluster_worker.engine.ports import GrammarCounts, StepSeconds
from pdcluster_worker.engine.prefill_delayer import DelayerCounts
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine import EngineStats


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of a batch; taken before the step, because its requests move on.

    num_requests:       items of the batch.
    num_tokens:         all tokens of the batch.
    num_decode_tokens:  those of requests past their prefill, one each and its drafts.
    num_prompt_tokens:  those that are part of a prompt.
    num_recomputed_tokens: those that were computed here before, and lost to a preemption.
    """

    num_requests: int
    num_tokens: int
    num_decode_tokens: int
    num_prompt_tokens: int
    num_recomputed_tokens: int

    @classmethod
    def of(cls, batch: Batch) -> "StepWork":
        """Count the tokens of a batch that has not run yet."""
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
        """As in `EngineStats.batches`."""
        computed_first = self.num_tokens - self.num_decode_tokens - self.num_recomputed_tokens
        return self.num_requests, computed_first, self.num_decode_tokens, self.num_recomputed_tokens

    @property
    def kind(self) -> str:
        """prefill, decode or mixed."""
        if self.num_decode_tokens == 0:
            return "prefill"
        return "decode" if self.num_decode_tokens == self.num_tokens else "mixed"


@dataclass(frozen=True, slots=True)
class Gauges:
    """State of the engine at the moment of a report."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    num_receiving: int
    blocks: dict[str, int]
    free_blocks: int
    fences_overdue: int
    preemptions: int
    bytes_sent: int
    bytes_received: int
    num_transfers: int
    num_inputs: int
    failed_rows: dict[str, int]
    evictions: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, and of its part inside the runner: in all, and by phase."""

    step: float
    model: float
    phases: StepSeconds


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of drafts, by position among those of one request in a step.

    drafted, accepted: of each position, how many drafts were verified there, and how many were
                       right.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One request's drafts were verified."""
        for counts, count in ((self.drafted, num_drafts), (self.accepted, num_accepted)):
            counts += [0] * (num_drafts - len(counts))
            for position in range(count):
                counts[position] += 1


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; see `messages.engine.EngineStats` for their meaning."""

    num_steps: int = 0
    busy_seconds: float = 0.0
    overhead_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    phases: StepSeconds = field(default_factory=StepSeconds)
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    steps: list[tuple[str, float]] = field(default_factory=list)
    batches: list[tuple[int, int, int, int]] = field(default_factory=list)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def count_request(self, request: EngineRequest) -> None:
        """A request got its blocks for the first time; a prefill for a peer counts its prompt at
        the peer, which admitted it.
        """
        if request.target is None:
            self.prompt_tokens += request.num_prompt_tokens
        self.prefix_query_tokens += request.num_tokens
        self.prefix_hit_tokens += request.num_cached_tokens

    def count_step(self, work: StepWork, times: StepTimes, num_sampled: int) -> None:
        """A step ran the model."""
        decode_seconds = times.step * work.num_decode_tokens / work.num_tokens
        self.num_steps += 1
        self.busy_seconds += times.step
        self.overhead_seconds += times.step - times.model
        self.phases += times.phases
        self.decode_seconds += decode_seconds
        self.prefill_seconds += times.step - decode_seconds
        self.prefill_tokens += work.num_prompt_tokens
        self.generation_tokens += num_sampled
        self.steps.append((work.kind, times.step))
        self.batches.append(work.size)

    def report(self, gauges: Gauges) -> EngineStats:
        """The message for the server; the lists of steps and batches start empty again."""
        steps, self.steps = self.steps, []
        batches, self.batches = self.batches, []
        return EngineStats(
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting,
            waiting_tokens=gauges.waiting_tokens,
            num_receiving=gauges.num_receiving,
            blocks=gauges.blocks,
            free_blocks=gauges.free_blocks,
            fences_overdue=gauges.fences_overdue,
            busy_seconds=self.busy_seconds,
            overhead_seconds=self.overhead_seconds,
            num_steps=self.num_steps,
            steps=steps,
            prompt_tokens=self.prompt_tokens,
            prefill_tokens=self.prefill_tokens,
            generation_tokens=self.generation_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            preemptions=gauges.preemptions,
            bytes_sent=gauges.bytes_sent,
            bytes_received=gauges.bytes_received,
            num_transfers=gauges.num_transfers,
            num_inputs=gauges.num_inputs,
            inputs_seconds=self.phases.inputs,
            forward_seconds=self.phases.forward,
            sample_seconds=self.phases.sample,
            failed_rows=gauges.failed_rows,
            evictions=gauges.evictions,
            batches=batches,
            drafted=list(self.speculation.drafted),
            accepted=list(self.speculation.accepted),
        )


def with_delays(stats: EngineStats, counts: DelayerCounts) -> EngineStats:
    """A report that says what the prefill delayer did too."""
    outcomes = [(*outcome, count) for outcome, count in counts.outcomes.items()]
    return replace(stats, delay_outcomes=outcomes, delay_waits=counts.waits)


def with_constraints(stats: EngineStats, counts: GrammarCounts) -> EngineStats:
    """A report that says what was done for constraints too."""
    if not (counts.requests or counts.compiles):
        return stats
    return replace(
        stats,
        constraint_requests=list(counts.requests.items()),
        constraint_hits=counts.hits,
        constraint_compiles=counts.compiles,
    )


class FirstTokens:
    """Time when each live request was first scheduled here, until it has its first
    token from here.
    """

    def __init__(self) -> None:
        self._scheduled_seconds: dict[str, float | None] = {}

    def schedule(self, request: EngineRequest, now: float) -> None:
        """The request has a seat; only the first time counts."""
        self._scheduled_seconds.setdefault(request.request_id, now)

    def sample(self, request: EngineRequest, now: float) -> tuple[float | None, float | None]:
        """(queue_seconds, prefill_seconds) for the first token that this engine makes for the
        request, (None, None) after.
        """
        scheduled = self._scheduled_seconds[request.request_id]
        if scheduled is None:
            return None, None
        self._scheduled_seconds[request.request_id] = None
        return scheduled - request.arrival_seconds, now - scheduled

    def forget(self, request: EngineRequest) -> None:
        """The request is over."""
        self._scheduled_seconds.pop(request.request_id, None)
