"""Inputs and results of the autoscaler. `at` and `now` are monotonic seconds, ratios 0 to 1."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.latency import Correction
from pdcluster_api.plan.observed.state import DecisionInput, DecisionStep, Problem, ScalingDecision
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

    Gauges are values of that moment.  Rates are per second over the time since the worker's scrape
    before; None = not known: its first scrape, or a counter that went back (a restart).
    prefill_queue_*:       its own part of the prefill queue
    """

    pod: str
    num_requests_running: float
    num_requests_waiting: float
    prefill_queue_requests: float
    prefill_queue_tokens: float
    kv_cache_usage_ratio: float
    engine_busy_ratio: float  # share of time in an engine step
    # mean of its GPUs; None = it has none, or their driver does not say
    gpu_utilization_ratio: float | None = None
    request_rate: float | None = None
    prompt_token_rate: float | None = None
    prefill_token_rate: float | None = None
    prefill_busy_rate: float | None = None
    # requests that wait at a router until a decode worker takes some; None = it does not say
    held_requests: float | None = None


@dataclass(frozen=True)
class PoolSample:
    """One round of scrapes of one pool."""

    at: float
    workers: tuple[WorkerSample, ...] = ()  # fresh numbers, by pod name in order
    # ready pods that have not answered with good numbers for too many rounds
    stale: tuple[str, ...] = ()
    # what all its workers observed since the round before: `ttft`, `itl` and `queue`
    latencies: Mapping[str, LatencyHistogram] = field(default_factory=dict)
    # the same of each workload, by its name
    by_workload: Mapping[str, Mapping[str, LatencyHistogram]] = field(default_factory=dict)


# Rounds of the last seconds of every pool, the oldest first
Windows = Mapping[PoolKey, Sequence[PoolSample]]


class Amounts(NamedTuple):
    """Workers, and their accelerators."""

    workers: int
    accelerators: int


@dataclass(frozen=True)
class Holding:
    """The pods of one StatefulSet of a pool; in a roll out a pool has several."""

    current: int  # how many there are, those that end included
    top: int  # below it a pod of every ordinal is there or may come
    ordinals: tuple[int, ...]  # of those that are known, in their order
    grows: bool  # whether the pool's size is its size, too
    gpus_per_replica: int = 1  # accelerators of each; another revision may have had another number
    lost: tuple[int, ...] = ()  # of pods of lost nodes, in neither: nothing can take their places
    elsewhere: int = 0  # workers of other StatefulSets that count for the pool's size, too

    def held(self, replicas: int) -> int:
        """The most pods on the way to that size: a terminating pod keeps its place."""
        size = max(self.top, replicas - self.elsewhere) if self.grows else self.top
        num_pods = size
        # of many sizes of many pools: nothing is counted that is not there
        if self.ordinals:
            num_below = bisect_left(self.ordinals, size) - bisect_left(self.ordinals, 0)
            num_pods += len(self.ordinals) - num_below
        if self.lost:
            num_pods -= sum(ordinal < size for ordinal in self.lost)
        return max(self.current, num_pods)


@dataclass(frozen=True)
class PoolFacts:
    """One pool as it is."""

    role: str
    pool: str
    gpu: str
    replicas: int  # workers that serve its role, by what the last recorded decision asks for
    current: int  # pods that exist, those that end included
    ready: int  # pods that are ready and do not end
    ending: int = 0  # pods that drain or terminate: they hold their accelerators meanwhile
    unschedulable: int = 0  # pods that no node takes
    # those of them that are the highest ordinals without a gap: the ones that a smaller StatefulSet
    # removes
    unschedulable_top: int = 0
    # how long the one that has waited longest has; 0 = none waits
    unschedulable_seconds: float = 0.0
    # why pods cannot be created at all (a quota, a webhook); None = they can
    fault: str | None = None
    # pods of lost nodes, in no other number: nothing can take their places
    lost: int = 0
    # replicas of its StatefulSet while it waits for drains: a lost pod below is created again
    top: int = 0
    # pods that drain and are still scraped: only their part of the prefill queue counts
    leaving: frozenset[str] = frozenset()
    unready_top: int = 0  # how many of the highest ordinals are not ready, without a gap
    # pods of each of its StatefulSets, of any revision; none = its pods have no names, as simulated
    # ones
    holdings: tuple[Holding, ...] = ()
    # accelerators of a worker that it gets, and of its pods without holdings
    gpus_per_replica: int = 1
    # of a flexible pool: how many more workers its StatefulSet is asked for than serve its role;
    # negative = fewer, and the others are of the other pool
    num_away: int = 0
    is_flipping: bool = False  # a worker of the pair has yet to take the role that it should have
    may_flip: bool = False  # another worker may change its role
    has_next: bool = False  # the next worker of this pool to do so is ready

    @property
    def key(self) -> PoolKey:
        return self.role, self.pool

    @property
    def num_requested(self) -> int:
        """Workers that its StatefulSet is asked for."""
        return self.replicas + self.num_away

    def held(self, replicas: int) -> Amounts:
        """The most at a time while so many come to serve.  Each StatefulSet holds its own:
        pods of one make no room in another, and several may grow. Terminating pods without names
        stand on the ordinals that growth would use: growth takes them back, or waits for them.
        """
        workers = accelerators = 0
        for each in self._holdings:
            number = each.held(replicas + self.num_away)
            workers += number
            accelerators += number * each.gpus_per_replica
        return Amounts(workers, accelerators)

    @cached_property
    def _holdings(self) -> tuple[Holding, ...]:
        top = max(self.top, self.num_requested + self.ending)
        unnamed = Holding(self.current, top, (), grows=True, gpus_per_replica=self.gpus_per_replica)
        return self.holdings or (unnamed,)


@dataclass(frozen=True)
class Clock:
    """Now, on two clocks.  wall: in UTC, for schedules and for texts."""

    now: float
    wall: datetime


@dataclass(frozen=True)
class FlipMemory:
    """Facts of flips for the next decision."""

    # the role that misses a worker which the other can give, and since when
    request: tuple[str, float] | None = None
    begun: float | None = None  # when the one under way was decided
    source: str | None = None  # the role whose worker that is; None = it goes back
    last: float = -math.inf  # when the last one was
    seconds: float = 0.0  # that the last one took, most of it to drain
    num_failed: int = 0  # in a row: their workers did not drain
    not_before: float = -math.inf  # after those


@dataclass(frozen=True)
class Memory:
    """Memory between two decisions.  A restart restarts the windows."""

    # by role, since the direction last changed, as in `stabilization`
    recommendations: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    # replicas by role at that time: another size restarts its window
    sizes: Mapping[str, int] = field(default_factory=dict)
    # until when nothing more is asked of a GPU type that has no room
    backoff: Mapping[str, float] = field(default_factory=dict)
    at: float = 0.0  # when the decision was made
    # with mode Advise, recommendations to scale up within the scale-down window, without those that
    # a later one reached
    advised: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    # by role and kind of latency
    corrections: Mapping[tuple[str, str], Correction] = field(default_factory=dict)
    flips: FlipMemory = FlipMemory()
    # since when no request has come, with these sizes; None = there are some
    idle_since: float | None = None


@dataclass(frozen=True)
class Outcome:
    decision: ScalingDecision
    memory: Memory
    changed: bool = False  # whether the replicas differ from those of the facts


@dataclass
class DecisionTrace:
    """Inputs, steps and problems, in the order in which they come about."""

    inputs: list[DecisionInput] = field(default_factory=list)
    steps: list[DecisionStep] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def step(self, rule: str, subject: str, sizes: tuple[int, int], why: str) -> None:
        before, after = sizes
        if before != after:
            self.steps.append(DecisionStep(rule, subject, before, after, why))

    def correct(self, rule: str, sizes: Mapping[str, int]) -> None:
        """Let the steps of a rule end at these sizes, by subject; one that changes nothing goes."""
        found = []
        for each in self.steps:
            if each.rule == rule:
                each = replace(each, after=sizes.get(each.subject, each.after))
            if each.rule != rule or each.before != each.after:
                found.append(each)
        self.steps = found
