"""A fluid model of both phases: one queue of prompts for all prefill workers, and streams that
decode on one worker each.

Requests are amounts: 0.3 of one can arrive.  A stream needs KV cache for its prompt and half its
answer, and a place in the batch, else it waits; decode steps slow down with more streams.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from pdcluster_api.errors import StartError
from pdcluster_api.plan.autoscale.pools import worker_weight
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import PoolSpec
from pdctl.replay.pools import SimulatedPool, SimulatedWorker, WorkerPhase
from pdctl.replay.trace import TraceLoad

ESTIMATED = {"prefill": "B200", "decode": "B300"}
"""Accelerator of each role that the defaults are estimates for."""


@dataclass(frozen=True)
class Speeds:
    """One worker of the first pool of its role.

    step_seconds:   of a decode step with one stream
    stream_seconds: that each further stream adds to a step
    kv_tokens:      capacity of a decode worker's KV cache
    start_seconds:  from the decision until a new worker is ready
    """

    prefill_tokens_per_second: float = 8_000.0
    step_seconds: float = 0.022
    stream_seconds: float = 0.0001
    kv_tokens: float = 393_000.0
    start_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            may_be_zero = name in ("stream_seconds", "start_seconds")
            if not (0.0 < number < 1e12 or (may_be_zero and number == 0.0)):
                least = "from 0 on" if may_be_zero else "of more than 0"
                fix = f"give a finite number {least}"
                option, reason = f"--{name.replace('_', '-')}", f"must not be {number:g}"
                raise StartError(f"{option}: {reason}; {fix}", exit_code=2)


def share_of_first(spec: PDClusterSpec, role: str, pool: PoolSpec) -> float:
    """Speed relative to the role's first pool, by accelerators.yaml."""
    first = spec.roles.present()[role].pools[0]
    return worker_weight(spec, role, pool) / worker_weight(spec, role, first)


_DUST = 1e-6  # of a request: less is none
# between two looks at requests that may begin to decode; an engine looks at every step
_MOMENT_SECONDS = 2.0


@dataclass
class PromptBatch:
    """since: arrival in seconds."""

    number: float
    input_tokens: float
    output_tokens: float
    since: float


@dataclass
class PrefillPhase:
    """engine_busy_ratio, tokens, served: of the last interval.

    served: (requests, seconds in the queue, seconds of their prefill)
    """

    speeds: Speeds
    queue: deque[PromptBatch] = field(default_factory=deque)
    engine_busy_ratio: float = 0.0
    tokens: float = 0.0
    served: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def ttft_seconds(self) -> float | None:
        """The mean; None = no prompt was served."""
        return _mean([(number, queue + prefill) for number, queue, prefill in self.served])

    @property
    def num_requests(self) -> float:
        return sum(batch.number for batch in self.queue)

    @property
    def num_tokens(self) -> float:
        return sum(batch.number * batch.input_tokens for batch in self.queue)

    def serve(
        self, load: TraceLoad, pools: Sequence[SimulatedPool], seconds: float
    ) -> list[PromptBatch]:
        """One interval; returns the requests whose prefill is done."""
        if load.requests_per_second > 0.0:
            self.queue.append(
                PromptBatch(
                    load.requests_per_second * seconds,
                    load.input_tokens,
                    load.output_tokens,
                    load.seconds,
                )
            )
        rate = self.speeds.prefill_tokens_per_second
        capacity = left = sum(len(pool.ready()) * pool.speed for pool in pools) * rate * seconds
        done: list[PromptBatch] = []
        while self.queue and left > _DUST:
            part = _take_tokens(self.queue, left)
            left -= part.number * part.input_tokens
            done.append(part)
        self.tokens = capacity - left
        self.engine_busy_ratio = self.tokens / capacity if capacity else 0.0
        self.served = [
            (batch.number, load.seconds - batch.since, batch.input_tokens / rate) for batch in done
        ]
        return done


def _take_tokens(queue: deque[PromptBatch], tokens: float) -> PromptBatch:
    """The first batch of the queue, or as much of it as the tokens suffice for."""
    first = queue[0]
    number = (
        first.number if first.number * first.input_tokens <= tokens else tokens / first.input_tokens
    )
    first.number -= number
    if first.number <= _DUST:
        queue.popleft()
    return PromptBatch(number, first.input_tokens, first.output_tokens, first.since)


@dataclass
class DecodePhase:
    """tokens: by worker, of the last interval; max_sequences: of one worker."""

    speeds: Speeds
    max_sequences: int
    waiting: deque[PromptBatch] = field(default_factory=deque)
    tokens: dict[int, float] = field(default_factory=dict)

    @property
    def num_requests_waiting(self) -> float:
        return sum(batch.number for batch in self.waiting)

    def serve(
        self, arrived: Sequence[PromptBatch], pools: Sequence[SimulatedPool], seconds: float
    ) -> None:
        """One interval in a few substeps: admit arrivals as capacity allows, then decode."""
        moments = math.ceil(seconds / _MOMENT_SECONDS)
        self.tokens = {}
        for _ in range(moments):
            self.waiting.extend(
                replace(batch, number=batch.number / moments)
                for batch in arrived
                if batch.output_tokens > 1.0
            )
            self._admit([worker for pool in pools for worker in pool.ready()])
            for pool in pools:
                for worker in pool.workers:
                    written = self._decode(worker, pool.speed, seconds / moments)
                    self.tokens[id(worker)] = self.tokens.get(id(worker), 0.0) + written

    def _admit(self, workers: Sequence[SimulatedWorker]) -> None:
        while self.waiting and (number := self._spread(self.waiting[0], workers)) > 0.0:
            self.waiting[0].number -= number
            if self.waiting[0].number > _DUST:
                break
            self.waiting.popleft()

    def usage(self, worker: SimulatedWorker) -> float:
        return min(1.0, worker.streams.held_tokens / self.speeds.kv_tokens)

    def step_seconds(self, worker: SimulatedWorker, speed: float) -> float:
        """The time per output token."""
        return (
            self.speeds.step_seconds
            + self.speeds.stream_seconds * max(0.0, worker.streams.number - 1.0)
        ) / speed

    def _spread(self, batch: PromptBatch, workers: Sequence[SimulatedWorker]) -> float:
        """Spread a batch by free capacity; returns how many requests were admitted."""
        capacities = [self._free_capacity(worker, batch) for worker in workers]
        capacity = sum(capacities)
        given = min(batch.number, capacity)
        if given <= _DUST:
            return 0.0
        for worker, own in zip(workers, capacities, strict=True):
            if own > 0.0:
                worker.streams.add(given * own / capacity, batch.input_tokens, batch.output_tokens)
        return given

    def _free_capacity(self, worker: SimulatedWorker, batch: PromptBatch) -> float:
        """In requests; one that is longer than the whole cache counts as just that long."""
        need = min(batch.input_tokens + batch.output_tokens / 2.0, self.speeds.kv_tokens)
        by_tokens = (
            (self.speeds.kv_tokens - worker.streams.held_tokens) / need
            if need > 0.0
            else float(self.max_sequences)
        )
        return max(0.0, min(by_tokens, self.max_sequences - worker.streams.number))

    def _decode(self, worker: SimulatedWorker, speed: float, seconds: float) -> float:
        """Returns the tokens decoded."""
        return (
            0.0
            if worker.state is WorkerPhase.STARTING
            else worker.streams.decode(seconds / self.step_seconds(worker, speed))
        )


def _mean(weighted: Sequence[tuple[float, float]]) -> float | None:
    weight = sum(each for each, _ in weighted)
    return sum(each * value for each, value in weighted) / weight if weight > 0.0 else None
