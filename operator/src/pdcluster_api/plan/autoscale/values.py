"""Inputs and results of the autoscaler: plain values, filled from scrapes and from what is
observed.

Times named `at` and `now` are seconds of a clock that never jumps (monotonic);
only schedules read the wall clock.  Ratios are 0 to 1.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from pdcluster_api.plan.observed.decision import DecisionInput, DecisionStep, ScalingDecision
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema.workload import PoolKey


def short(value: float | None) -> str:
    """A number as text: three digits, or all before the point.

    >>> short(0.70344), short(23.07), short(1998.0), short(None)
    ('0.703', '23.1', '1998', 'unknown')
    """
    if value is None:
        return "unknown"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


@dataclass(frozen=True)
class WorkerSample:
    """Numbers of one worker from one scrape, under the names of its metrics.

    Gauges are values of that moment.  Rates are per second and latencies are means in seconds, both
    over the time since the worker's scrape before; None = not known: its first scrape, a counter
    that went back (a restart), or no event to count.
    prefill_queue_*:       its own part of the prefill queue
    engine_busy_ratio:     share of time in an engine step
    gpu_utilization_ratio: mean of its GPUs; None = it has none, or their driver does not say
    """

    pod: str
    num_requests_running: float
    num_requests_waiting: float
    prefill_queue_requests: float
    prefill_queue_tokens: float
    kv_cache_usage_ratio: float
    engine_busy_ratio: float
    gpu_utilization_ratio: float | None = None
    request_rate: float | None = None
    prompt_token_rate: float | None = None
    prefill_token_rate: float | None = None
    prefill_busy_rate: float | None = None
    generation_token_rate: float | None = None
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None


@dataclass(frozen=True)
class PoolSample:
    """One round of scrapes of one pool.

    workers: fresh numbers, by pod name in order
    stale:   ready pods that have not answered with good numbers for too many rounds
    """

    at: float
    workers: tuple[WorkerSample, ...] = ()
    stale: tuple[str, ...] = ()


Windows = Mapping[PoolKey, Sequence[PoolSample]]
"""Rounds of the last seconds of every pool, the oldest first."""


class Amounts(NamedTuple):
    """Workers, and their accelerators."""

    workers: int
    accelerators: int


@dataclass(frozen=True)
class Holding:
    """The pods of one StatefulSet of a pool; in a roll out a pool has several.

    current:  how many there are, those that end included
    top:      below it a pod of every ordinal is there or may come
    ordinals: of those that are known, in their order
    grows:    whether the pool's size is its size, too
    gpus_per_replica: accelerators of each; another revision may have had another number
    """

    current: int
    top: int
    ordinals: tuple[int, ...]
    grows: bool
    gpus_per_replica: int = 1

    def held(self, replicas: int) -> int:
        """The most pods at a time while the pool moves to that size: a terminating pod keeps its
        place.
        """
        size = max(self.top, replicas) if self.grows else self.top
        # asked for many sizes of many pools
        num_below = bisect_left(self.ordinals, size) - bisect_left(self.ordinals, 0)
        return max(self.current, size + len(self.ordinals) - num_below)


@dataclass(frozen=True)
class PoolFacts:
    """One pool as it is.

    replicas:               what the last recorded decision asks for
    current:                pods that exist, those that end included
    ready:                  pods that are ready and do not end
    ending:                 pods that drain or terminate: they hold their accelerators meanwhile
    unschedulable:          pods that no node takes
    unschedulable_top:      those of them that are the highest ordinals without a gap: the ones
                            that a smaller StatefulSet removes
    unready_top:            how many of the highest ordinals are not ready, without a gap
    unschedulable_seconds:  how long the one that has waited longest has; 0 = none waits
    fault:                  why pods cannot be created at all (a quota, a webhook); None = they can
    top:                    replicas of its StatefulSet while it waits for drains: a lost pod below
                            is created again
    leaving:                pods that drain and are still scraped: only their part of the prefill
                            queue counts
    holdings:               pods of each of its StatefulSets, of any revision; none = its pods have
                            no names, as simulated ones
    gpus_per_replica:       accelerators of a worker that it gets, and of its pods without holdings
    """

    role: str
    pool: str
    gpu: str
    replicas: int
    current: int
    ready: int
    ending: int = 0
    unschedulable: int = 0
    unschedulable_top: int = 0
    unschedulable_seconds: float = 0.0
    fault: str | None = None
    top: int = 0
    leaving: frozenset[str] = frozenset()
    unready_top: int = 0
    holdings: tuple[Holding, ...] = ()
    gpus_per_replica: int = 1

    @property
    def key(self) -> PoolKey:
        """(role, pool)."""
        return self.role, self.pool

    def held(self, replicas: int) -> Amounts:
        """The most at a time while the pool moves to that size.

        Each StatefulSet holds its own: pods of one make no room in another, and several may grow.
        Terminating pods without names stand on the ordinals that growth would use: growth takes
        them back, or waits for them.
        """
        workers = accelerators = 0
        for each in self._holdings:
            number = each.held(replicas)
            workers += number
            accelerators += number * each.gpus_per_replica
        return Amounts(workers, accelerators)

    @cached_property
    def _holdings(self) -> tuple[Holding, ...]:
        top = max(self.top, self.replicas + self.ending)
        unnamed = Holding(self.current, top, (), grows=True, gpus_per_replica=self.gpus_per_replica)
        return self.holdings or (unnamed,)


@dataclass(frozen=True)
class Clock:
    """Now, on two clocks.  wall: in UTC, for schedules and for texts."""

    now: float
    wall: datetime


@dataclass(frozen=True)
class Memory:
    """State that the autoscaler carries from one decision to the next.  A restart restarts the
    windows.

    recommendations: by role, since the direction last changed, as in `stabilization`
    sizes:   replicas by role at that time: another size restarts its window
    backoff: until when nothing more is asked of a GPU type that has no room
    at:      when the decision was made
    advised: with mode Advise, recommendations to scale up within the scale-down window, without
             those that a later one reached
    """

    recommendations: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    backoff: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0
    advised: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of one call of `decide`.

    changed: whether the replicas differ from those of the facts.
    """

    decision: ScalingDecision
    memory: Memory
    changed: bool = False


@dataclass
class DecisionTrace:
    """Inputs, steps and problems, in the order in which they come about."""

    inputs: list[DecisionInput] = field(default_factory=list)
    steps: list[DecisionStep] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def step(self, rule: str, subject: str, sizes: tuple[int, int], why: str) -> None:
        """Note that a rule took a role or pool from one size to another, if it did."""
        before, after = sizes
        if before != after:
            self.steps.append(DecisionStep(rule, subject, before, after, why))
