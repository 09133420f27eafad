"""Rolling roll outs over several pools: renamed in the middle, and of types that roles share."""

import random
from itertools import product

import pytest

from pdcluster_api.plan.rolling.fleet import (
    AcceleratorBudget,
    NewPool,
    OldWorkers,
    RollingRole,
    accelerators,
)
from pdcluster_api.plan.rolling.steps import all_steps
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.plan.clusters import make_cluster, pool
from tests.operator.pdcluster_api.plan.simulated import (
    SimulatedCluster,
    assert_as_declared,
    assert_at_rest,
)


def with_pools(rng: random.Random) -> PDCluster:
    """One or two pools a role, and a decode pool of one of two names."""
    others = [
        [pool(rng.randint(1, 2), name)] * (rng.random() < 0.6) for name in (rng.choice("xy"), "x")
    ]
    return make_cluster(
        prefill=[pool(rng.randint(1, 3)), *others[0]],
        decode=[pool(rng.randint(1, 3), rng.choice(["cpu", "z"])), *others[1]],
        engine=rng.choice([64, 65, 66]),
        strategy="Rolling",
    )


@pytest.mark.parametrize("seed", range(25))
def test_a_worker_answers_whatever_pools_are_declared_in_the_middle(seed: int) -> None:
    """A pool of the revision that is gone back to may have another name by then."""
    rng, existing = random.Random(seed), SimulatedCluster()
    existing.settle(make_cluster(prefill=[pool(2)], decode=[pool(2)], strategy="Rolling"))
    for _ in range(6):
        existing.generation += 1
        cluster = with_pools(rng)
        for _ in range(rng.randint(1, 5)):
            answered = existing.num_answering()
            existing.carry_out(existing.plan(cluster), crash=rng.random() < 0.2)
            assert existing.num_answering() or not answered, existing
            for workload in sorted({*existing.sets, *existing.pods}):
                if rng.random() < 0.6:
                    existing.step(workload)
    existing.settle(cluster, rounds=200)
    assert_at_rest(existing, cluster)
    assert_as_declared(existing, cluster)


Fleet = tuple[tuple[int, int], tuple[int, int]]
"""By role the workers of both types."""


def role_of(name: str, workers: tuple[int, int], gpus: tuple[int, int]) -> RollingRole:
    pools, old = [], []
    for gpu, size, each in zip("ab", workers, gpus, strict=True):
        if size:
            pools.append(NewPool((name, gpu), size, 0, 0, gpu, each))
            place = WorkloadId("chat", name, gpu, "old")
            ready = frozenset(range(size))
            old.append(OldWorkers(place, size, ready, num_pods=size, gpu=gpu, gpus=each))
    return RollingRole(name, tuple(pools), tuple(old), surge=0, unavailable=1)


@pytest.mark.parametrize("gpus", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("limit", ["total", "types"])
def test_a_roll_out_within_the_fleet_ends_whatever_types_its_roles_share(
    gpus: tuple[int, int], limit: str
) -> None:
    """A new worker takes the place that an old one of its pool has left, not another role's."""
    for decode, prefill in product(product(range(4), repeat=2), repeat=2):
        if not (any(decode) and any(prefill)):
            continue
        roles = [role_of("decode", decode, gpus), role_of("prefill", prefill, gpus)]
        held = accelerators(roles)
        budget = (
            AcceleratorBudget(held.total()) if limit == "total" else AcceleratorBudget(None, held)
        )
        *_, (last, _) = all_steps(roles, budget)
        assert not last.short, (decode, prefill)
        assert not any(last.old.values()), (decode, prefill)
        assert sum(last.new.values()) == sum(decode) + sum(prefill)
