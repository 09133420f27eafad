"""The arithmetic of a rolling roll out: how many new and old workers each role has next. Pure.

A step takes each role forward by up to `max(surge, unavailable)` workers, and all roles by one
share, so that new ones, old ones and all together keep the desired ratio of prefill to decode
within one worker.  It follows from what is there:

    finished steps   those for which all roles have enough new workers that serve
    new workers      up to the next step, within desired + surge and the budget
    old workers      those that desired - unavailable needs beside the new ones that serve

Workers are missing on purpose only where surge or budget have no room for new ones.  Growth goes to
the new workers once they serve, before that to the old ones, and with gates to the old ones until
the last has passed; a smaller role loses old ones first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdcluster_api.plan.rolling.fleet import (
    PREFILL,
    AcceleratorBudget,
    OldWorkers,
    RollingRole,
    accelerators,
    with_one_more,
    without_one,
)
from pdcluster_schema.workload import PoolKey, WorkloadId


@dataclass(frozen=True)
class RollingStep:
    """Sizes from now on.  number: the step that is under way, of `steps`"""

    new: Mapping[PoolKey, int]
    old: Mapping[WorkloadId, int]
    number: int
    steps: int
    # by role: new workers that are to become ready, and old ones that drain
    starting: Mapping[str, int] = field(default_factory=dict)
    draining: Mapping[str, int] = field(default_factory=dict)
    finished: int = 0  # steps that have all their new workers, ready and serving
    # accelerators of any one type that would do for the next worker, beyond the budget; empty = it
    # goes on
    short: Mapping[str, int] = field(default_factory=dict)
    is_stuck: bool = False  # it waits for nothing, and has not ended


def in_band(counts: Iterable[tuple[int, int]]) -> bool:
    """Return whether all roles are within one worker of one share of what is desired.

    counts: workers that there are and that are desired, by role

    >>> in_band([(1, 2), (3, 4)]), in_band([(0, 2), (4, 4)])
    (True, False)
    """
    known = [each for each in counts if each[1]]
    lowest = max(((number - 1) / desired for number, desired in known), default=0.0)
    return lowest <= min(((number + 1) / desired for number, desired in known), default=0.0)


def num_steps(roles: Iterable[RollingRole]) -> int:
    return max((-(-role.desired // role.batch) for role in roles if role.desired), default=1)


def next_step(
    roles: Sequence[RollingRole],
    budget: AcceleratorBudget,
    *,
    serves: bool,
    passed: int | None = None,
) -> RollingStep:
    """The sizes that follow from what is there.

    roles:  those that answer first
    serves: requests reach the new workers, so that ready ones count and may take growth
    passed: steps whose gate has passed, beyond which one more may be made; None = no gates
    """
    step = _step(roles, budget, serves=serves, passed=passed)
    if step.is_stuck and passed is not None:  # no room beside those that a gate would keep
        step = _step(roles, budget, serves=serves, passed=passed, keeps_gated=False)
    # An old prefill worker that is kept for old decode workers must not hold up the roll out.
    if not step.is_stuck:
        return step
    return _step(roles, budget, serves=serves, passed=passed, keeps_gated=False, keeps_pairs=False)


def _step(
    roles: Sequence[RollingRole],
    budget: AcceleratorBudget,
    *,
    serves: bool,
    passed: int | None,
    keeps_gated: bool = True,
    keeps_pairs: bool = True,
) -> RollingStep:
    steps = num_steps(roles)
    finished = _num_finished(roles, steps) if serves else 0
    number = min(finished + 1, steps if passed is None else passed + 1, steps)
    is_at_gate = passed is not None and passed < finished
    is_gated = passed is not None
    wakes = not any(role.size or role.old_size for role in roles) and all(
        role.desired > role.unavailable for role in roles if role.desired
    )  # else the next step would take the old ones away again, to make room
    until = passed if passed is not None and wakes else number  # what wakes has passed its gate
    goals = {
        role.name: _goal(role, role.goal(until, steps), serves=serves, is_gated=is_gated)
        for role in roles
    }
    held = accelerators(roles)
    grown = [_grown(role, goals[role.name], budget, held) for role in roles]
    made, short = _made(grown, goals, budget)
    shown = passed if keeps_gated else None
    ready = {role.name: _shown(role, shown, steps) if serves else 0 for role in made}
    needed = {
        role.name: _needed(role, goals[role.name], ready[role.name], serves=serves) for role in made
    }
    kept = _kept(made, needed, keeps_pairs=keeps_pairs)
    starting = {role.name: role.size - role.ready for role in kept if role.size > role.ready}
    draining = {role.name: role.num_draining for role in kept if role.num_draining}
    is_stuck = not (starting or draining or is_at_gate) and kept == list(roles)
    return RollingStep(
        new={pool.key: pool.size for role in kept for pool in role.pools},
        old={each.id: each.size for role in kept for each in role.old},
        number=number,
        steps=steps,
        starting=starting,
        draining=draining,
        finished=finished,
        short=short if is_stuck else {},
        is_stuck=is_stuck,
    )


def _num_finished(roles: Sequence[RollingRole], steps: int) -> int:
    """Steps for which all roles have their new workers."""
    for step in range(1, steps + 1):
        if any(role.ready < role.goal(step, steps) for role in roles):
            return step - 1
    return steps


def _goal(role: RollingRole, goal: int, *, serves: bool, is_gated: bool) -> int:
    """New workers to have next, with growth where they take it."""
    growing = {each.id.pool for each in role.old if each.may_grow}
    if growing and not serves:
        return goal
    missing = role.desired - role.num_old
    if is_gated and not growing.isdisjoint(pool.key[1] for pool in role.pools):
        missing = min(missing, goal + role.num_lost)
    return max(goal, missing)


def _grown(
    role: RollingRole, goal: int, budget: AcceleratorBudget, held: Counter[str]
) -> RollingRole:
    """With growth where old workers take it and the budget has room, and new ones within what is
    desired.
    """
    pools = {pool.key[1]: replace(pool, size=min(pool.size, pool.desired)) for pool in role.pools}
    old = list(role.old)

    def share(workers: OldWorkers) -> float:
        pool = pools[workers.id.pool]
        return (workers.size + pool.size + 0.5) / max(pool.desired, 0.5)

    for _ in range(role.desired - role.old_size - max(goal, role.size)):
        growing = [
            each
            for each in old
            if each.may_grow and each.id.pool in pools and budget.takes(held, each.gpu, each.more)
        ]
        if not growing:
            break
        one = min(growing, key=share)
        held[one.gpu] += one.more
        old[old.index(one)] = replace(one, size=one.size + 1)
    return replace(role, pools=tuple(pools.values()), old=tuple(old))


def _made(
    roles: Sequence[RollingRole], goals: Mapping[str, int], budget: AcceleratorBudget
) -> tuple[list[RollingRole], dict[str, int]]:
    """The roles with the new workers that there is room for, the role that is furthest behind
    first; and what the budget lacks for the next one.
    """
    found, held = {role.name: role for role in roles}, accelerators(roles)
    while True:
        behind = [role for role in found.values() if role.size < goals[role.name]]
        behind = [role for role in behind if role.name != PREFILL or _answers(found, goals)]
        short = dict[str, int]()
        for role in sorted(behind, key=lambda role: role.share):
            then = {**found, role.name: _one_larger(role)}
            is_first = role.share == min(each.share for each in behind)
            if not role.has_place or not (is_first or _new_in_band(then.values())):
                continue
            taken, lacking = with_one_more(role, budget, held)
            short |= lacking
            if taken is not None:
                found[role.name] = taken
                break
        else:
            return list(found.values()), short


def _answers(roles: Mapping[str, RollingRole], goals: Mapping[str, int]) -> bool:
    """True if new workers answer that are to: a prefill worker before them could take their budget,
    and old ones go only for both.
    """
    return all(role.size or not goals[name] for name, role in roles.items() if name != PREFILL)


def _one_larger(role: RollingRole) -> RollingRole:
    pool = next(pool for pool in role.pools if pool.size < pool.desired)
    more = replace(pool, size=pool.size + 1)
    return replace(role, pools=tuple(more if each is pool else each for each in role.pools))


def _new_in_band(roles: Iterable[RollingRole]) -> bool:
    return in_band((role.size, role.desired) for role in roles)


def _shown(role: RollingRole, passed: int | None, steps: int) -> int:
    """Ready new workers that take the places of old ones: with gates, those that have passed."""
    return role.ready if passed is None else min(role.ready, role.goal(passed, steps))


def _needed(role: RollingRole, goal: int, ready: int, *, serves: bool) -> int:
    """Old workers that have to stay ready."""
    if not serves and not role.desired:
        return role.old_size  # a role that is no longer declared, while its revision serves alone
    missing = min(role.unavailable, max(0, goal - role.size))
    return role.desired - missing - ready


def _kept(
    roles: Sequence[RollingRole], needed: Mapping[str, int], *, keeps_pairs: bool
) -> list[RollingRole]:
    """The roles with the old workers that are still needed; the role that has the most goes first,
    so that the rest keep the ratio too.
    """
    found = {role.name: role for role in roles}
    while True:
        decoding = {
            each.id.revision
            for role in found.values()
            for each in role.old
            if role.name != PREFILL and each.size and keeps_pairs
        }
        fewer = {}
        for name, role in found.items():
            less = without_one(role, needed[name], decoding if name == PREFILL else ())
            if less is not None:
                fewer[name] = less
        order = sorted(fewer, key=lambda name: -_old_share(found[name]))
        for name in order:
            then = {**found, name: fewer[name]}
            if name == order[0] or in_band((each.old_size, each.desired) for each in then.values()):
                found[name] = fewer[name]
                break
        else:
            return list(found.values())


def _old_share(role: RollingRole) -> float:
    return role.old_size / max(role.desired, 0.5)


def all_steps(
    roles: Sequence[RollingRole], budget: AcceleratorBudget
) -> Iterator[tuple[RollingStep, Counter[str]]]:
    """Every change of sizes of a roll out in which all goes well, and the most accelerators on the
    way to it.  The budget blocks the last one where that is `short`.
    """
    now, serves = list(roles), False
    for _ in range(4 * sum(role.desired + role.old_size + 1 for role in roles)):
        step = next_step(now, budget, serves=serves)
        then = [_carried_out(role, step) for role in now]
        if then == now and (serves or step.short):
            if step.short:
                yield step, accelerators(now)
            return
        on_the_way = (
            replace(role, pools=after.pools) for role, after in zip(now, then, strict=True)
        )
        yield step, accelerators(on_the_way)
        now, serves = then, True


def _carried_out(role: RollingRole, step: RollingStep) -> RollingRole:
    """All new workers are ready, and old ones have ended."""
    pools = tuple(
        replace(pool, size=size, ready=size, num_pods=size, dead=frozenset())
        for pool in role.pools
        for size in (step.new[pool.key],)
    )
    sizes = [(each, step.old[each.id]) for each in role.old]
    none = frozenset[int]()
    old = tuple(
        replace(each, size=size, ready=frozenset(range(size)), lost=none, num_pods=size, dead=none)
        for each, size in sizes
    )
    return replace(role, pools=pools, old=old)
