"""A pair of flexible pools under a load, decision after decision: workers drain before they change
their role, and new ones take their time to start.
"""

import math
from dataclasses import dataclass, field, replace

from pdcluster_api.plan.autoscale.decide import decide
from pdcluster_api.plan.autoscale.values import (
    Clock,
    Memory,
    Outcome,
    PoolFacts,
    PoolSample,
    WorkerSample,
)
from pdcluster_api.plan.observed.state import Flipped
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey
from tests.operator.pdcluster_api.plan.autoscale.worlds import IDLE, NOON, NOW, D, P

OTHER = {P: D, D: P}
INTERVAL = 5.0


@dataclass
class FlipWorld:
    """load: workers' worth of work, by role; a worker is ready `start_seconds` after it was asked
    for, and has the other role `drain_seconds` after that was asked
    """

    spec: PDClusterSpec
    sizes: dict[PoolKey, int]
    load: dict[str, float]
    start_seconds: float = 120.0
    drain_seconds: float = 20.0
    may_flip: bool = True
    waits_for_blocks: bool = False  # what decode has no room for counts in the prefill queue
    flipped: Flipped | None = None
    now: float = NOW
    memory: Memory = field(default_factory=Memory)
    since: dict[PoolKey, list[float]] = field(default_factory=dict)  # of each worker, by ordinal
    flips_at: float = -math.inf  # when the last change of a role is done
    rounds: dict[PoolKey, list[PoolSample]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.since = {key: [-math.inf] * size for key, size in self.sizes.items()}
        self.rounds = {key: [] for key in self.sizes}

    def away(self, key: PoolKey) -> int:
        return self.flipped.away(key) if self.flipped else 0

    def serving(self, key: PoolKey) -> int:
        return self.sizes[key] - self.away(key)

    @property
    def is_flipping(self) -> bool:
        return self.now < self.flips_at

    @property
    def flips(self) -> int:
        """Workers of prefill that serve decode; negative = the other way round."""
        return self.away(P)

    def run(self, seconds: float) -> "FlipWorld":
        end = self.now + seconds
        while self.now < end:
            self.decide()
            self.now += INTERVAL
        return self

    def decide(self) -> Outcome:
        for key in self.sizes:
            self.rounds[key].append(self._scraped(key))
            del self.rounds[key][:-60]
        facts = [self._facts(key) for key in self.sizes]
        outcome = decide(self.spec, facts, self.rounds, self.memory, Clock(self.now, NOON))
        self.memory = outcome.memory
        self.outcomes.append(outcome)
        self._carry_out(outcome)
        return outcome

    def _carry_out(self, outcome: Outcome) -> None:
        decision = outcome.decision
        if decision.flipped != self.flipped:
            self.flips_at = self.now + self.drain_seconds
        self.flipped = decision.flipped
        for key, size in decision.replicas.items():
            self.sizes[key] = size
            kept = self.since[key][:size]
            self.since[key] = kept + [self.now] * (size - len(kept))

    def _ready(self, key: PoolKey) -> int:
        """Ready workers of a role; the one that changes it serves neither."""
        own = sum(self.now - since >= self.start_seconds for since in self.since[key])
        return max(0, own - self.away(key) - (self.is_flipping and self._takes(key)))

    def _takes(self, key: PoolKey) -> bool:
        """Return whether the last change of a role was towards this one."""
        last = next(
            step.after > step.before
            for outcome in reversed(self.outcomes)
            for step in outcome.decision.steps
            if step.rule in ("flip", "flipBack") and step.subject == "/".join(key)
        )
        return bool(last)

    def _facts(self, key: PoolKey) -> PoolFacts:
        number = max(0, self.away(key))
        oldest = self.since[key][number : number + 1]
        return PoolFacts(
            *key,
            "H100",
            self.serving(key),
            self.sizes[key],
            self._ready(key),
            num_away=self.away(key),
            is_flipping=self.is_flipping,
            may_flip=self.may_flip,
            has_next=bool(oldest) and self.now - oldest[0] >= self.start_seconds,
        )

    def _scraped(self, key: PoolKey) -> PoolSample:
        ready = self._ready(key)
        share = self.load[key[0]] / ready if ready else 0.0
        waiting = max(0.0, self.load[key[0]] - ready) * 20.0
        worker = replace(IDLE, engine_busy_ratio=min(1.0, share))
        if key == D:
            worker = replace(worker, kv_cache_usage_ratio=min(1.0, share))
            if self.waits_for_blocks:
                worker = replace(worker, prefill_queue_requests=waiting / max(1, ready))
            else:
                worker = replace(worker, num_requests_waiting=waiting / max(1, ready))
        else:
            worker = replace(worker, prefill_queue_requests=waiting / max(1, ready))
        return PoolSample(self.now, tuple(_named(worker, key, number) for number in range(ready)))


def _named(worker: WorkerSample, key: PoolKey, number: int) -> WorkerSample:
    return replace(worker, pod=f"{'-'.join(key)}-{number}")
