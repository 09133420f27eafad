"""Rolling with workers on lost nodes: these hold no accelerators, and nothing waits for them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, combinations

import pytest

from pdcluster_api.plan.rolling.fleet import (
    AcceleratorBudget,
    NewPool,
    OldWorkers,
    RollingRole,
    accelerators,
)
from pdcluster_api.plan.rolling.steps import RollingStep, next_step
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    Planned,
    condition_of,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)
from tests.operator.pods import pod_state

LONG_AGO = "2026-01-01T00:00:00Z"


def role(name: str, size: int, dead: Iterable[int] = ()) -> RollingRole:
    """Old workers of which some are on lost nodes, before the first new one."""
    gone = frozenset(dead)
    ready = frozenset(range(size)) - gone
    old = OldWorkers(
        *(WorkloadId("chat", name, "h", "a"), size, ready, gone, len(ready), "h"), dead=gone
    )
    return RollingRole(name, (NewPool((name, "h"), size, 0, 0, "h"),), (old,), 1, 0)


def carried_out(found: RollingRole, step: RollingStep) -> RollingRole:
    """New workers are ready; old ones have ended, but for those of lost nodes."""
    pools = [
        replace(each, size=size, ready=size, num_pods=size)
        for each in found.pools
        for size in (step.new[each.key],)
    ]
    old = [
        replace(each, size=size, ready=ready, num_pods=len(ready))
        for each in found.old
        for size in (step.old[each.id],)
        for ready in (each.ready & frozenset(range(size)),)
    ]
    return replace(found, pools=tuple(pools), old=tuple(old))


def some(size: int) -> list[tuple[int, ...]]:
    of_each = (combinations(range(size), number) for number in range(size + 1))
    return list(chain.from_iterable(of_each))


@pytest.mark.parametrize("dead", some(4)[1:], ids=str)
@pytest.mark.parametrize("prefill", some(2), ids=str)
def test_it_ends_within_the_room_that_lost_nodes_leave(
    prefill: Sequence[int], dead: Sequence[int]
) -> None:
    roles, budget = [role("decode", 4, dead), role("prefill", 2, prefill)], AcceleratorBudget(7)
    for _ in range(20):
        step = next_step(roles, budget, serves=True)
        assert not step.short
        roles = [carried_out(each, step) for each in roles]
        assert accelerators(roles).total() <= 7
        if not any(step.old.values()):
            assert step.new == {("decode", "h"): 4, ("prefill", "h"): 2}
            return
    raise AssertionError(roles)


def test_what_ends_on_a_lost_node_is_not_waited_for() -> None:
    found = role("decode", 2, (1,))
    shrunk = replace(found, old=(replace(found.old[0], size=0, num_pods=0),))
    assert (shrunk.num_draining, accelerators([shrunk]).total()) == (0, 0)


def rolling(engine: int, budget: int | None = None) -> PDCluster:
    found = make_cluster(prefill=[pool(2)], decode=[pool(4)], engine=engine, strategy="Rolling")
    autoscale = found.spec.autoscale
    limit = autoscale.budget.model_copy(update={"total": budget})
    spec = {"autoscale": autoscale.model_copy(update={"budget": limit})}
    return found.model_copy(update={"spec": found.spec.model_copy(update=spec)})


def plan_of_seven(*, is_lost: bool) -> Planned:
    """The plan for 2P4D and one new worker with a budget of 7, two old ones not ready: on a lost
    node, or on one that answers.
    """
    old, new = rolling(64), rolling(65, budget=7)
    a, b = revision_of(old.spec), revision_of(new.spec)
    end = {"terminating": True, "node": "n1", "since": LONG_AGO} if is_lost else {}
    pods = [pod_state(identity(a), each, ready=False, **end) for each in (0, 1)]
    pods += [pod_state(identity(a), each) for each in (2, 3)]
    states = [
        workload(identity(a, "prefill"), 2),
        workload(identity(a), 4, 2, pods=tuple(pods)),
        workload(identity(b), 1),
    ]
    status = {"servingRevision": a}
    observed = running(old, workloads=states, service_is_wide=True, status=status)
    return plan_all(new, observed, NOW)


def test_workers_of_a_lost_node_leave_their_room_in_the_budget_to_new_ones() -> None:
    plan = plan_of_seven(is_lost=True)

    new = {each.id.role: each.replicas for each in plan.workloads[:2]}
    assert new == {"prefill": 1, "decode": 2}
    assert condition_of(plan.status, "RolloutOverBudget") == {}


def test_unready_workers_of_a_node_that_answers_keep_their_room() -> None:
    lacks = condition_of(plan_of_seven(is_lost=False).status, "RolloutOverBudget")
    assert "needs 1 cpu more than autoscale.budget has" in lacks["message"]
