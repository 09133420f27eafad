"""Size of a pool. Pure. A scaler's spec is the request; a pool's `replicas` seeds it, and is a
request again only when it changes, so that an unchanged file never undoes a scale.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdcluster_api.plan.observed.state import ScalerState, WorkloadState
from pdcluster_api.plan.result import ScalerPlan
from pdcluster_schema import labels
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.values import MAX_REPLICAS, MAX_WORKERS
from pdcluster_schema.workload import PoolKey


@dataclass(frozen=True)
class PoolSize:
    """The size of one declared pool."""

    role: str
    pool: PoolSpec
    desired: int  # workers that count, within min and max
    requested: int  # what the scaler asks for, or will after this plan
    request: int | None  # replicas to write into the scaler now; None = its spec stays as it is
    gpus_per_replica: int = 1  # accelerators of one worker

    @property
    def key(self) -> PoolKey:
        return self.role, self.pool.name

    @property
    def note(self) -> str | None:
        """Note for a user that asked for another size; None = they got it."""
        if self.desired == self.requested:
            return None
        return f"pool {self.pool.name}: {self.requested} workers are asked for, {self._limit}"

    @property
    def _limit(self) -> str:
        if self.requested < self.desired:
            return f"minReplicas is {self.pool.min_replicas}"
        if self.desired == self.pool.max_replicas:
            return f"maxReplicas is {self.pool.max_replicas}"
        if self.desired == MAX_REPLICAS:
            return f"a pool has {MAX_REPLICAS} at most"
        return f"all pools have {MAX_WORKERS} at most together"


def pool_sizes(
    spec: PDClusterSpec, scalers: Iterable[ScalerState], before: Mapping[PoolKey, int]
) -> tuple[PoolSize, ...]:
    """The size of every declared pool, in the spec's order.  before: replicas that were wanted
    until now, by pool; they seed a scaler that is not there
    """
    known = {(scaler.role, scaler.pool): scaler for scaler in scalers}
    pools = [
        (role, pool) for role, declared in spec.roles.present().items() for pool in declared.pools
    ]
    return together(
        [
            replace(
                _size(role, pool, known.get((role, pool.name)), before.get((role, pool.name))),
                gpus_per_replica=spec.gpus_per_replica(role, pool),
            )
            for role, pool in pools
        ]
    )


def together(sizes: Sequence[PoolSize]) -> tuple[PoolSize, ...]:
    """Sizes within the workers of one object: the greatest pools are cut to one level.  Not below
    minReplicas, which the spec keeps to that number itself.
    """

    def cut(size: PoolSize, level: int) -> int:
        return min(size.desired, max(level, size.pool.min_replicas or 0))

    if sum(size.desired for size in sizes) <= MAX_WORKERS:
        return tuple(sizes)
    levels = range(MAX_WORKERS + 1)
    level = (
        bisect_right(levels, MAX_WORKERS, key=lambda each: sum(cut(size, each) for size in sizes))
        - 1
    )
    return tuple(replace(size, desired=cut(size, level)) for size in sizes)


def _size(role: str, pool: PoolSpec, scaler: ScalerState | None, before: int | None) -> PoolSize:
    if scaler is None:
        seed = clamp(pool.replicas if before is None else before, pool)
        return PoolSize(role, pool, desired=seed, requested=seed, request=seed)
    if scaler.seen == pool.replicas:
        return PoolSize(
            role,
            pool,
            desired=clamp(scaler.replicas, pool),
            requested=scaler.replicas,
            request=None,
        )
    # Without its mark a change of `replicas` cannot be known: the scale stays, and the mark is
    # written again.
    requested = scaler.replicas if scaler.seen is None else pool.replicas
    return PoolSize(
        role,
        pool,
        desired=clamp(requested, pool),
        requested=requested,
        request=min(requested, MAX_REPLICAS),
    )


def clamp(replicas: int, pool: PoolSpec) -> int:
    high = MAX_REPLICAS if pool.max_replicas is None else pool.max_replicas
    return max(min(replicas, high), pool.min_replicas or 0)


def plan_scaler(
    cluster: str, size: PoolSize, shown: WorkloadState | None, serving: str
) -> ScalerPlan:
    """shown: the workload of its status, else that of the revision `serving`"""
    revision = serving if shown is None else shown.id.revision
    status: dict[str, Any] = {
        "replicas": 0 if shown is None else shown.current,
        "selector": _selector(cluster, size, revision),
    }
    return ScalerPlan(
        role=size.role,
        pool=size.pool.name,
        seen=size.pool.replicas,
        request=size.request,
        status=status,
    )


def _selector(cluster: str, size: PoolSize, revision: str) -> str:
    """A label selector for HPA, of one revision: a rollout counts no worker twice."""
    desired = {
        labels.CLUSTER: cluster,
        labels.ROLE: size.role,
        labels.POOL: size.pool.name,
        labels.REVISION: revision,
    }
    return ",".join(f"{key}={value}" for key, value in desired.items())
