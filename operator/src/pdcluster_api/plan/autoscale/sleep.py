"""Sleep of a cluster without requests, and its wake: the pools of all roles go to zero together,
and come back as soon as a router holds a request. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdcluster_api.plan.autoscale import rules
from pdcluster_api.plan.autoscale.pools import Pool, Vector
from pdcluster_api.plan.autoscale.safety import is_same
from pdcluster_api.plan.autoscale.totals import fresh_rounds
from pdcluster_api.plan.autoscale.values import (
    DecisionTrace,
    Memory,
    PoolFacts,
    PoolSample,
    Windows,
    WorkerSample,
)
from pdcluster_api.plan.observed.state import DecisionInput, Problem
from pdcluster_schema import conditions
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import ROUTER
from pdcluster_schema.text import and_more
from pdcluster_schema.workload import PoolKey

HELD = "held_requests"
_LEAST = 1e-9  # a number below it is none


@dataclass(frozen=True)
class Traffic:
    """held: requests that routers hold; unknown: routers that give no numbers; is_idle: every
    worker and router says that it has no request, and had none since the scrape before
    """

    held: float
    unknown: tuple[str, ...]
    is_idle: bool

    @classmethod
    def of(cls, windows: Windows, now: float, seconds: float) -> "Traffic":
        """seconds: the age up to which a round counts"""
        newest = {
            key: next(iter(fresh_rounds(rounds, now, seconds)), PoolSample(now, stale=(key[1],)))
            for key, rounds in windows.items()
        }
        routers = [sample for (role, _), sample in newest.items() if role == ROUTER]
        held = sum(worker.held_requests or 0.0 for worker in _workers(routers))
        unknown = tuple(pod for sample in routers for pod in sample.stale)
        is_known = bool(_workers(routers)) and not any(each.stale for each in newest.values())
        return cls(held, unknown, is_known and all(map(_is_idle, _workers(newest.values()))))


def _workers(samples: Iterable[PoolSample]) -> list[WorkerSample]:
    return [worker for sample in samples for worker in sample.workers]


def _is_idle(worker: WorkerSample) -> bool:
    rates = (worker.request_rate, worker.prompt_token_rate)
    numbers = (
        worker.num_requests_running,
        worker.num_requests_waiting,
        worker.prefill_queue_requests,
        worker.held_requests or 0.0,
    )
    is_known = all(rate is not None and rate < _LEAST for rate in rates)
    return is_known and all(number < _LEAST for number in numbers)


@dataclass(frozen=True)
class Rest:
    """wakes: why a cluster that sleeps gets workers, None = it does not; since: from when on it has
    had no request and its present sizes, None = it has some
    """

    wakes: str | None = None
    since: float | None = None


def rest_of(
    spec: PDClusterSpec,
    facts: Iterable[PoolFacts],
    sizes: Mapping[str, int],
    seen: tuple[Windows, Memory, float],
    trace: DecisionTrace,
) -> Rest:
    """sizes: workers by role"""
    windows, memory, now = seen
    if not spec.may_sleep:
        return Rest()
    traffic = Traffic.of(windows, now, spec.autoscale.fresh_seconds)
    if not any(sizes.values()):
        trace.inputs += [DecisionInput(role, HELD, round(traffic.held, 4), 0.0) for role in sizes]
        if traffic.unknown:
            trace.problems.append(_unknown(traffic.unknown))
        return Rest(wakes=_wake_reason(traffic, facts))
    if not traffic.is_idle:
        return Rest()
    same = all(is_same(memory, role, size, spec.autoscale, now) for role, size in sizes.items())
    return Rest(since=memory.idle_since if same and memory.idle_since is not None else now)


def _unknown(routers: Sequence[str]) -> Problem:
    message = (
        f"router {routers[0]}{and_more(len(routers))} gives no numbers that can be used, so a "
        "request that it holds wakes nothing; look at its /metrics"
    )
    return Problem(conditions.METRICS_MISSING, message)


def _wake_reason(traffic: Traffic, facts: Iterable[PoolFacts]) -> str | None:
    if traffic.held > 0.0:
        requests = "1 request" if traffic.held <= 1.0 else f"{traffic.held:.0f} requests"
        return f"routers hold {requests}"
    if not any(each.replicas for each in facts if each.role == ROUTER):
        return "no router is asked for, and nothing else could hold a request"
    return None


def woken(rest: Rest, recommendations: Mapping[str, int], trace: DecisionTrace) -> dict[str, int]:
    """Recommended workers by role: the first of each where the cluster wakes."""
    if rest.wakes is None:
        return dict(recommendations)
    for role, workers in recommendations.items():
        trace.step(rules.WAKE, role, (workers, max(1, workers)), rest.wakes)
    return {role: max(1, workers) for role, workers in recommendations.items()}


def rested(
    rest: Rest,
    spec: PDClusterSpec,
    pools: Sequence[Pool],
    sizes: tuple[Vector, Vector],
    seen: tuple[Memory, Mapping[str, int], float],
    *,
    trace: DecisionTrace,
) -> Vector:
    """The sizes after all other rules, or those of a cluster that sleeps.  sizes: before and after
    them; seen: memory, recommendations by role, and the time
    """
    before, after = sizes
    is_serving = any(after[pool.key] for pool in pools if pool.role == spec.decode_role)
    if rest.wakes is not None:
        why = f"no {spec.decode_role} worker can come, and none serves without one"
        return after if is_serving else _emptied(pools, after, why, trace)
    memory, recommendations, now = seen
    window = spec.autoscale.scale_down.window_seconds
    is_over = rest.since is not None and now - rest.since >= window
    is_settled = dict(after) == dict(before) and not _shrinks(
        pools, before, memory, recommendations
    )
    if not (is_over and is_settled and _can_sleep(spec, pools)):
        return after
    return _emptied(pools, after, f"no request for {window} s: all roles sleep", trace)


def _shrinks(
    pools: Sequence[Pool], sizes: Vector, memory: Memory, recommendations: Mapping[str, int]
) -> bool:
    """Return whether a role waits in its window to scale down: step by step goes first."""
    for role, size in sizes_by_role(pools, sizes).items():
        past = memory.recommendations.get(role, ())
        if past and past[-1][1] < size == recommendations[role]:
            return True
    return False


def _can_sleep(spec: PDClusterSpec, pools: Sequence[Pool]) -> bool:
    """Return whether no schedule wants workers, and each role has a ready one: before, it may be on
    its way for a request whose client has given up.
    """
    ready = {pool.role for pool in pools if pool.facts.ready}
    return not any(pool.low for pool in pools) and ready == set(spec.roles.computing())


def sizes_by_role(pools: Sequence[Pool], sizes: Vector) -> dict[str, int]:
    roles = dict.fromkeys(pool.role for pool in pools)
    return {role: sum(sizes[pool.key] for pool in pools if pool.role == role) for role in roles}


def _emptied(
    pools: Sequence[Pool], sizes: Vector, why: str, trace: DecisionTrace
) -> dict[PoolKey, int]:
    for role, number in sizes_by_role(pools, sizes).items():
        trace.step(rules.SLEEP, role, (number, 0), why)
    return dict.fromkeys(sizes, 0)
