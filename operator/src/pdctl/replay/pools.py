"""Simulated pools: workers by ordinal, as of a StatefulSet; nodes are unlimited."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdcluster_api.plan.autoscale.values import PoolFacts
from pdcluster_schema.workload import PoolKey

STAGES = 4
_LAST = 0.5  # of a stream: less is none


@dataclass
class Streams:
    """numbers: requests by stage; input_tokens, output_tokens: means of a request."""

    input_tokens: float = 0.0
    output_tokens: float = 0.0
    numbers: list[float] = field(default_factory=lambda: [0.0] * STAGES)

    @property
    def number(self) -> float:
        return sum(self.numbers)

    @property
    def is_done(self) -> bool:
        return self.number < _LAST

    @property
    def held_tokens(self) -> float:
        """Tokens in the KV cache."""
        answered = sum(number * (stage + 0.5) for stage, number in enumerate(self.numbers)) / STAGES
        return self.number * self.input_tokens + answered * self.output_tokens

    def add(self, number: float, input_tokens: float, output_tokens: float) -> None:
        total = self.number + number
        self.input_tokens += (input_tokens - self.input_tokens) * number / total
        self.output_tokens += (output_tokens - self.output_tokens) * number / total
        self.numbers[0] += number

    def decode(self, tokens: float) -> float:
        """Decode up to `tokens` for each stream; returns the sum."""
        if self.number <= 0.0:
            return 0.0
        stage_tokens = self.output_tokens / STAGES
        passes = _poisson(tokens / stage_tokens)
        after = [0.0] * STAGES
        passed = 0.0
        for stage, number in enumerate(self.numbers):
            left = STAGES - stage
            for steps in range(left):
                after[stage + steps] += number * passes[steps]
                passed += number * passes[steps] * steps
            passed += number * (1.0 - sum(passes[:left])) * left
        self.numbers = after
        return passed * stage_tokens


def _poisson(mean: float) -> Sequence[float]:
    """Probabilities of 0 to `STAGES` - 1 events.

    >>> [round(each, 3) for each in _poisson(1.0)]
    [0.368, 0.368, 0.184, 0.061]
    """
    found = [math.exp(-mean)]
    for number in range(1, STAGES):
        found.append(found[-1] * mean / number)
    return found


class WorkerPhase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass
class SimulatedWorker:
    """since: second of its last change of state; streams: requests that it decodes."""

    ordinal: int
    state: WorkerPhase
    since: float
    streams: Streams = field(default_factory=Streams)

    def enter(self, state: WorkerPhase, now: float) -> None:
        self.state, self.since = state, now


@dataclass
class SimulatedPool:
    """speed: relative to the role's first pool; gpus_per_replica: accelerators of each."""

    role: str
    name: str
    gpu: str
    speed: float
    replicas: int
    gpus_per_replica: int = 1
    workers: list[SimulatedWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers = [
            SimulatedWorker(ordinal, WorkerPhase.READY, 0.0) for ordinal in range(self.replicas)
        ]

    @property
    def key(self) -> PoolKey:
        return self.role, self.name

    def ready(self) -> Sequence[SimulatedWorker]:
        return self.in_phase(WorkerPhase.READY)

    def in_phase(self, state: WorkerPhase) -> Sequence[SimulatedWorker]:
        return [worker for worker in self.workers if worker.state is state]

    def facts(self) -> PoolFacts:
        """As the operator observes it."""
        ready, ending = len(self.ready()), len(self.in_phase(WorkerPhase.DRAINING))
        return PoolFacts(
            self.role,
            self.name,
            self.gpu,
            self.replicas,
            len(self.workers),
            ready,
            ending,
            gpus_per_replica=self.gpus_per_replica,
        )

    def scale(self, replicas: int, now: float) -> None:
        """The highest ordinals drain; draining workers are reused before new ones start."""
        self.replicas = replicas
        there = {worker.ordinal: worker for worker in self.workers}
        for ordinal in range(replicas):
            worker = there.setdefault(ordinal, SimulatedWorker(ordinal, WorkerPhase.STARTING, now))
            if worker.state is WorkerPhase.DRAINING:
                worker.enter(WorkerPhase.READY, now)
        for ordinal, worker in list(there.items()):
            if ordinal >= replicas and worker.state is WorkerPhase.STARTING:
                del there[ordinal]
            elif ordinal >= replicas and worker.state is WorkerPhase.READY:
                worker.enter(WorkerPhase.DRAINING, now)
        self.workers = [there[ordinal] for ordinal in sorted(there)]

    def advance(
        self, now: float, start_seconds: float, drain_timeout_seconds: float | None
    ) -> float:
        """Make workers ready and remove drained ones; returns the streams cut by the timeout."""
        cut = 0.0
        staying = []
        for worker in self.workers:
            if worker.state is WorkerPhase.STARTING and now - worker.since >= start_seconds:
                worker.enter(WorkerPhase.READY, now)
            if worker.state is WorkerPhase.DRAINING and now > worker.since:
                is_late = (
                    drain_timeout_seconds is not None
                    and now - worker.since >= drain_timeout_seconds
                )
                if is_late or worker.streams.is_done:
                    cut += 0.0 if worker.streams.is_done else worker.streams.number
                    continue
            staying.append(worker)
        self.workers = staying
        return cut


def scale_pools(
    pools: Iterable[SimulatedPool], replicas: Mapping[PoolKey, int], now: float
) -> None:
    for pool in pools:
        pool.scale(replicas[pool.key], now)
