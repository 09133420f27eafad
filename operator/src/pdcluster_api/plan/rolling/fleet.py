"""Workers of a rolling roll out by role: new ones by pool, and old ones by workload."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pdcluster_schema.workload import PoolKey, WorkloadId

PREFILL = "prefill"


class _Held:
    """Accelerators' workers of one StatefulSet: `dead` ones keep a place and hold nothing."""

    size: int
    num_pods: int
    dead: frozenset[int]

    @property
    def places(self) -> int:
        """Workers of its size that hold accelerators, or will."""
        return self.size - _num_below(self.size, self.dead)

    @property
    def held(self) -> int:
        return max(self.places, self.num_pods)


@dataclass(frozen=True)
class NewPool(_Held):
    """Workers of a declared pool."""

    key: PoolKey
    desired: int
    size: int  # that it should have by now
    ready: int  # of them, that are ready
    gpu: str = ""
    gpus: int = 1  # accelerators of each
    num_pods: int = 0  # workers that there are, those that end included, and without dead ones
    dead: frozenset[int] = frozenset()  # ordinals of those that are on lost nodes


@dataclass(frozen=True)
class OldWorkers(_Held):
    """Workers of one older workload."""

    id: WorkloadId
    size: int  # that it should have by now
    ready: frozenset[int]  # ordinals of ready ones
    # ordinals of those that had their time to be ready: nothing is expected of them
    lost: frozenset[int] = frozenset()
    num_pods: int = 0  # workers that there are, draining and ending ones too, without dead ones
    gpu: str = ""
    gpus: int = 1  # accelerators of each
    may_grow: bool = True  # it served before this roll out began
    dead: frozenset[int] = frozenset()  # ordinals of those that are on lost nodes, all lost

    @property
    def more(self) -> int:
        """Accelerators that one worker more would ask for; one that drains has its own."""
        return (replace(self, size=self.size + 1).held - self.held) * self.gpus

    @property
    def num_lost(self) -> int:
        return _num_below(self.size, self.lost)

    @property
    def num_ready(self) -> int:
        return _num_below(self.size, self.ready)


def _num_below(size: int, ordinals: Iterable[int]) -> int:
    return sum(ordinal < size for ordinal in ordinals)


@dataclass(frozen=True)
class RollingRole:
    name: str
    pools: tuple[NewPool, ...]
    old: tuple[OldWorkers, ...]
    surge: int  # workers beyond those that are desired
    unavailable: int  # workers that may be missing
    has_gates: bool = False  # KV is to move between new workers after each step

    @property
    def desired(self) -> int:
        return sum(pool.desired for pool in self.pools)

    @property
    def size(self) -> int:
        return sum(pool.size for pool in self.pools)

    @property
    def ready(self) -> int:
        return sum(min(pool.ready, pool.size) for pool in self.pools)

    @property
    def share(self) -> float:
        return self.size / self.desired if self.desired else 1.0

    @property
    def num_old(self) -> int:
        """Old workers that are ready, or may be again."""
        return self.old_size - self.num_lost

    @property
    def num_lost(self) -> int:
        return sum(each.num_lost for each in self.old)

    @property
    def old_size(self) -> int:
        return sum(each.size for each in self.old)

    @property
    def old_ready(self) -> int:
        return sum(each.num_ready for each in self.old)

    @property
    def num_draining(self) -> int:
        return sum(each.held - each.places for each in self.old)

    @property
    def has_place(self) -> bool:
        """True if another new worker is within what is desired and the surge."""
        old = sum(each.held - _num_below(each.size, each.lost - each.dead) for each in self.old)
        ending = sum(pool.held - pool.places for pool in self.pools)
        return old + self.size + ending < self.desired + self.surge

    @property
    def batch(self) -> int:
        return max(self.surge, self.unavailable, 1)

    def goal(self, step: int, steps: int) -> int:
        """New workers after so many steps; from the first one on a worker that answers, and one
        that prefills for it where a gate asks whether KV moves.
        """
        least = min(step, self.desired, self.name != PREFILL or self.has_gates)
        return max(least, (2 * step * self.desired + steps) // (2 * steps))


@dataclass(frozen=True)
class AcceleratorBudget:
    """The most accelerators."""

    total: int | None = None
    per_gpu: Mapping[str, int] = field(default_factory=dict)

    def available(self, held: Counter[str], gpu: str) -> int | None:
        """Accelerators of a type that may still be asked for; None = no limit."""
        limits = [] if self.total is None else [self.total - held.total()]
        if gpu in self.per_gpu:
            limits.append(self.per_gpu[gpu] - held[gpu])
        return min(limits, default=None)

    def takes(self, held: Counter[str], gpu: str, number: int) -> bool:
        free = self.available(held, gpu)
        return not number or free is None or free >= number


def can_serve(roles: Iterable[RollingRole]) -> bool:
    """Return whether requests may reach new workers: one answers, or none is to, and one prefills
    where any is there by now.
    """
    every = {role.name: role for role in roles}
    prefill = every.pop(PREFILL, None)
    desired = sum(role.desired for role in every.values())
    answers = not desired or any(role.ready for role in every.values())
    return answers and (prefill is None or not prefill.size or prefill.ready > 0)


def accelerators(roles: Iterable[RollingRole]) -> Counter[str]:
    """Accelerators that workers hold or will, by type."""
    held = Counter[str]()
    for role in roles:
        for pool in role.pools:
            held[pool.gpu] += pool.held * pool.gpus
        for each in role.old:
            held[each.gpu] += each.held * each.gpus
    return held


def with_one_more(
    role: RollingRole, budget: AcceleratorBudget, held: Counter[str]
) -> tuple[RollingRole | None, dict[str, int]]:
    """The role with one more new worker, first where an old one has made room; None = no pool has
    room, and what the budget lacks.
    """
    short = dict[str, int]()
    old = Counter[str]()
    for each in role.old:
        old[each.id.pool] += each.size

    def rank(pool: NewPool) -> tuple[bool, float]:
        return pool.size + old[pool.key[1]] >= pool.desired, (pool.size + 0.5) / pool.desired

    for pool in sorted((pool for pool in role.pools if pool.size < pool.desired), key=rank):
        free = budget.available(held, pool.gpu)
        if free is None or free >= pool.gpus:
            more = replace(pool, size=pool.size + 1)
            held[pool.gpu] += (more.held - pool.held) * pool.gpus
            rest = tuple(more if each is pool else each for each in role.pools)
            return replace(role, pools=rest), {}
        short[pool.gpu] = pool.gpus - free
    return None, short


def without_one(role: RollingRole, needed: int, paired: Iterable[str]) -> RollingRole | None:
    """The role without one old worker: a lost one, else one that is not ready, else one of the pool
    that has most too many; None = all are needed.

    needed: old workers that have to stay ready
    paired: revisions that keep the last one
    """
    declared = {pool.key[1]: pool.desired - pool.size for pool in role.pools}
    found = []
    for index, each in enumerate(role.old):
        top = each.size - 1
        if top < 0 or (each.id.revision in paired and _is_last(role, each)):
            continue
        is_lost, is_ready = top in each.lost, top in each.ready
        if is_lost or (role.num_old > needed and (not is_ready or role.old_ready > needed)):
            surplus = each.size - declared.get(each.id.pool, 0)
            found.append((not is_lost, is_ready, each.may_grow, -surplus, index))
    if not found:
        return None
    index = min(found)[-1]
    old = list(role.old)
    old[index] = replace(old[index], size=old[index].size - 1)
    return replace(role, old=tuple(old))


def _is_last(role: RollingRole, workers: OldWorkers) -> bool:
    of_revision = (each.size for each in role.old if each.id.revision == workers.id.revision)
    return sum(of_revision) == 1
