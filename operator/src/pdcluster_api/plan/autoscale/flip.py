"""Flips: a worker of a flexible pool takes the other role without a restart, where budget or
capacity refuses that role a worker and the other one has one to spare. Pure.

Sizes are of workers that serve a role. A flip moves one between the two pools; their StatefulSets
keep their sizes, so no accelerator is held for it.  One is under way at a time.  It waits until
need and spare have lasted for what two changes of role cost, but no longer than for the window of
a scale down; a worker that would go changes at once.  A worker goes back when its role needs it,
at once where that has none ready, or when the other one shrinks.  No role gives its last ready one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import Band, Pool, Vector, capacity
from pdcluster_api.plan.autoscale.values import DecisionTrace, FlipMemory
from pdcluster_api.plan.observed.state import DecisionStep, Flipped
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.workload import PoolKey

OTHER = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True)
class Needs:
    """Workers of each role: after windows and steps, and by its signals alone."""

    allowed: Mapping[str, int]
    needed: Mapping[str, int]


@dataclass
class FlipPlan:
    """Sizes and flips on the way to those of a decision.

    pools: the flexible ones by role; every: all of them
    base, sizes: workers that serve, of all pools, before the decision and by it
    away:  workers of `home` that serve the other role
    """

    pools: Mapping[str, Pool]
    every: Sequence[Pool]
    base: Vector
    sizes: dict[PoolKey, int]
    home: str
    away: int

    @classmethod
    def of(
        cls,
        pair: tuple[PoolKey, PoolKey],
        pools: Sequence[Pool],
        base: Vector,
        sizes: Vector,
    ) -> "FlipPlan":
        flexible = {pool.role: pool for pool in pools if pool.key in pair}
        home = max(flexible, key=lambda role: flexible[role].facts.num_away)
        away = max(0, flexible[home].facts.num_away)
        return cls(flexible, pools, base, dict(sizes), home, away)

    @property
    def is_flipping(self) -> bool:
        return any(pool.facts.is_flipping for pool in self.pools.values())

    @property
    def may_change(self) -> bool:
        may = all(pool.facts.may_flip for pool in self.pools.values())
        return may and not self.is_flipping

    @property
    def flipped(self) -> Flipped | None:
        if not self.away:
            return None
        return Flipped(self.pools[self.home].key, self.pools[OTHER[self.home]].key, self.away)

    def size(self, role: str) -> int:
        return self.sizes[self.pools[role].key]

    def had(self, role: str) -> int:
        return self.base[self.pools[role].key]

    def shrinks(self, role: str) -> bool:
        return self.size(role) < self.had(role)

    def grows(self, role: str) -> bool:
        return self.size(role) > self.had(role)

    def with_one_more(self, role: str) -> int:
        """Workers that serve a role with one of the other, in place of one that it grows by."""
        return max(self.size(role), min(self.size(role), self.had(role)) + 1)

    def may_lose_ready(self, role: str) -> bool:
        """Return whether a role has a ready worker without the one that leaves it."""
        return self.pools[role].facts.ready > 1

    def total(self, role: str, sizes: Vector) -> int:
        return sum(sizes[pool.key] for pool in self.every if pool.role == role)

    def replicas(self) -> dict[PoolKey, int]:
        """Sizes of the StatefulSets."""
        flipped = self.flipped
        return {
            key: size + (flipped.away(key) if flipped else 0) for key, size in self.sizes.items()
        }

    def move(self, source: str, trace: DecisionTrace, why: str) -> None:
        """One worker changes from a role to the other: back, or away."""
        is_back = bool(self.away) and self.home != source
        rule = rules.FLIP_BACK if is_back else rules.FLIP
        giver, taker = self.pools[source], self.pools[OTHER[source]]
        before = dict(self.sizes)
        if self.shrinks(source):
            before[giver.key] += 1
        if self.grows(taker.role):
            before[taker.key] -= 1
        trace.correct(rules.POOL, {pool.name: before[pool.key] for pool in (giver, taker)})
        self.sizes[giver.key] = min(self.size(source), self.had(source) - 1)
        self.sizes[taker.key] = self.with_one_more(OTHER[source])
        if is_back:
            self.away -= 1
        else:
            self.home, self.away = source, self.away + 1
        for pool in (giver, taker):
            role = pool.role
            sums = self.total(role, before), self.total(role, self.sizes)
            trace.step(rule, role, sums, why)
            trace.step(rule, pool.name, (before[pool.key], self.sizes[pool.key]), why)


def plan_flips(
    plan: FlipPlan,
    needs: Needs,
    spec: PDClusterSpec,
    *,
    memory: FlipMemory,
    now: float,
    trace: DecisionTrace,
) -> FlipMemory:
    """Change `plan` by one flip at most; returns what the next decision has to know."""
    memory = _timed(memory, now, is_flipping=plan.is_flipping)
    limit = _limit_seconds(spec)
    if memory.begun is not None and memory.source and now - memory.begun >= limit:
        why = f"a worker of {memory.source} keeps its role: it has not drained within {limit:g} s"
        plan.move(OTHER[memory.source], trace, why)
        _keep_home(plan, trace)
        return _failed(memory, now)
    source = _returns(plan) or _given_back(plan)
    may_lose = source is not None and plan.may_lose_ready(source)
    if source is not None and may_lose and plan.may_change:
        role, why = OTHER[source], _why_back(plan, source)
        plan.move(source, trace, f"a worker of {role} takes its own role again: {why}")
        memory = replace(memory, begun=now, last=now, request=None, source=None)
    else:
        if source is not None and (plan.is_flipping or not may_lose):
            key = plan.pools[source].key
            plan.sizes[key] = max(plan.sizes[key], plan.base[key])
        memory = _flip(plan, needs, spec.autoscale, memory=memory, now=now, trace=trace)
    _keep_home(plan, trace)
    return memory


def _timed(memory: FlipMemory, now: float, *, is_flipping: bool) -> FlipMemory:
    """The same with the time that a flip took, once it has ended."""
    if memory.begun is None or is_flipping or now <= memory.begun:
        return memory
    seconds, ended = now - memory.begun, replace(memory, begun=None, source=None)
    return replace(ended, seconds=seconds, num_failed=0, not_before=-math.inf)


def _limit_seconds(spec: PDClusterSpec) -> float:
    """Seconds in which a worker drains for a flip; a flip that drains nothing takes some too."""
    unset = max(rules.FLIP_LIMIT_SECONDS, spec.autoscale.scale_down.window_seconds)
    return max(rules.FLIP_SECONDS, spec.rollout.drain_timeout_seconds or unset)


def _failed(memory: FlipMemory, now: float) -> FlipMemory:
    """The next one waits for an hour, and twice as long for each that fails in a row."""
    number = memory.num_failed + 1
    return FlipMemory(
        last=now,
        seconds=now - (memory.begun or now),
        num_failed=number,
        not_before=now + rules.FLIP_RETRY.after(number),
    )


def _returns(plan: FlipPlan) -> str | None:
    """The role that gives a worker back to one which is below its minimum, or has none ready."""
    home, host = plan.home, OTHER[plan.home]
    pool, spare = plan.pools[home], plan.size(host) - max(1, plan.pools[host].low)
    is_silent = not pool.facts.ready and plan.may_lose_ready(host)
    is_silent = is_silent and plan.with_one_more(home) <= pool.high
    is_short = plan.size(home) < pool.low or is_silent
    return host if plan.away and is_short and spare > 0 else None


def _why_back(plan: FlipPlan, source: str) -> str:
    role = OTHER[source]
    if plan.size(role) < plan.pools[role].low:
        return f"{role} is below its minReplicas"
    if not plan.pools[role].facts.ready:
        return f"{role} has no ready worker"
    return f"{source} needs it no longer"


def _given_back(plan: FlipPlan) -> str | None:
    """The role that shrinks, as it needs fewer, and has a worker of the other one."""
    host = OTHER[plan.home]
    return host if plan.away and plan.shrinks(host) else None


def _flip(
    plan: FlipPlan,
    needs: Needs,
    spec: AutoscaleSpec,
    *,
    memory: FlipMemory,
    now: float,
    trace: DecisionTrace,
) -> FlipMemory:
    short = next((role for role in OTHER if _helps(plan, role, needs, spec)), None)
    if short is None:
        return replace(memory, request=None)
    is_same = memory.request is not None and memory.request[0] == short
    since = memory.request[1] if memory.request and is_same else now
    memory = replace(memory, request=(short, since))
    source = OTHER[short]
    # a worker that would be scaled away has been spare for the whole window
    wait = 0.0 if plan.shrinks(source) else _wait_seconds(memory, spec)
    is_back = bool(plan.away) and plan.home == short
    last = memory.last + spec.scale_down.window_seconds * is_back
    ready_at = max(since + wait, last, memory.not_before)
    if now < ready_at or not plan.may_change:
        return memory
    why = _why(plan, short, needs, now - since)
    plan.move(source, trace, why)
    return replace(memory, begun=now, last=now, request=None, source=source)


def _why(plan: FlipPlan, short: str, needs: Needs, seconds: float) -> str:
    source, allowed = OTHER[short], needs.allowed[short]
    if plan.shrinks(source):
        return f"{short} needs {allowed}, and {source} shrinks to {plan.total(source, plan.sizes)}"
    missing = allowed - plan.total(short, plan.sizes)
    has = plan.total(source, plan.base)
    return (
        f"{short} misses {missing}, and {source} needs {needs.needed[source]} of its {has}, for "
        f"{seconds:.0f} s"
    )


def _wait_seconds(memory: FlipMemory, spec: AutoscaleSpec) -> float:
    """Seconds for which need and spare must last: two changes of role, at least a minute, but no
    longer than a worker takes to go.
    """
    cost = max(rules.FLIP_SECONDS, rules.FLIP_COST * memory.seconds)
    return max(spec.scale_up.window_seconds, min(cost, spec.scale_down.window_seconds))


def _helps(plan: FlipPlan, short: str, needs: Needs, spec: AutoscaleSpec) -> bool:
    """Return whether a role misses a worker that the other one can give."""
    source = OTHER[short]
    taker, giver = plan.pools[short], plan.pools[source]
    is_met = plan.total(short, plan.sizes) >= needs.allowed[short]
    is_exchanged = plan.shrinks(source) and plan.grows(short)
    if (is_met and not is_exchanged) or plan.with_one_more(short) > taker.high:
        return False
    if giver.facts.ending or taker.facts.ending:
        return False  # their accelerators become free
    if not plan.may_lose_ready(source):
        return False
    has = plan.total(source, plan.base)
    rest = min(plan.size(source), plan.had(source) - 1)
    if has <= max(1, needs.needed[source]) or rest < max(1, giver.low):
        return False
    is_back = bool(plan.away) and plan.home == short
    return (is_back or giver.facts.has_next) and _keeps_band(plan, source, spec)


def _keeps_band(plan: FlipPlan, source: str, spec: AutoscaleSpec) -> bool:
    band, short = Band.of(spec.ratio), OTHER[source]
    after = dict(plan.sizes)
    after[plan.pools[source].key] = min(plan.size(source), plan.had(source) - 1)
    after[plan.pools[short].key] = plan.with_one_more(short)
    before, then = (
        band.distance(*(capacity(role, plan.every, sizes) for role in OTHER))
        for sizes in (plan.sizes, after)
    )
    return then <= before or math.isclose(then, 0.0)


def _keep_home(plan: FlipPlan, trace: DecisionTrace) -> None:
    """A role with workers of the other one keeps at least one of its own: below that size they all
    go back, as where a budget or a bound falls.
    """
    host = OTHER[plan.home]
    rest = max(0, min(plan.away, plan.size(host) - 1))
    if rest == plan.away:
        return
    number = plan.total(host, plan.sizes)
    why = f"{host} has workers of its own too: {plan.away - rest} of {plan.home} go back"
    trace.steps.append(DecisionStep(rules.FLIP_BACK, host, number, number, why))
    plan.away = rest
