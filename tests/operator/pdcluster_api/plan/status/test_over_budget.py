"""A BlueGreen roll out says, before its first worker is made, how far it exceeds the budget."""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.observed.state import Observed, Previous
from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    Planned,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
    workload,
)

OLD, TYPE = "0123abcd", "RolloutOverBudget"
EIGHT = {"gpu": "B200", "gpusPerReplica": 8}


def scaled(mode: str = "On", strategy: str = "BlueGreen", **budget: Any) -> PDCluster:
    """Two B200 workers of eight accelerators in each role."""
    pools = (pool(2, **EIGHT),)
    cluster = make_cluster(prefill=pools, decode=pools, strategy=strategy)
    autoscale = AutoscaleSpec.model_validate({"mode": mode, "budget": budget})
    return cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"autoscale": autoscale})}
    )


def before(cluster: PDCluster, gpus: int = 8) -> Observed:
    """The old revision serves, and nothing of the new one is there."""
    old = [
        workload(identity(OLD, role), 2, gpu="B200", gpus_per_replica=gpus)
        for role in ("prefill", "decode")
    ]
    status = {"revision": OLD, "servingRevision": OLD}
    return running(cluster, workloads=old, service_revision=OLD, status=status)


def message(plan: Planned) -> str | None:
    return Previous(plan.status).condition(TYPE).get("message")


def test_it_is_in_status_and_event_before_a_worker_is_made() -> None:
    cluster = scaled(total=32, perGpu={"B200": 40})
    plan = plan_all(cluster, before(cluster), NOW)
    said = str(message(plan))

    assert "64 accelerators, 32 beyond budget.total 32, 64 B200, 24 beyond budget.perGpu 40" in said
    assert plan.reports_first
    (started,) = [event for event in plan.events if event.reason == "RolloutStarted"]
    assert started.message.endswith(said)
    assert started.warning


def test_once_it_is_written_the_workers_are_made_and_it_stays_until_the_old_ones_go() -> None:
    cluster = scaled(total=32)
    observed = before(cluster)
    observed = replace(observed, status=plan_all(cluster, observed, NOW).status)
    plan = plan_all(cluster, observed, NOW)

    assert not plan.reports_first
    assert message(plan) == Previous(observed.status).condition(TYPE)["message"]
    target = revision_of(cluster.spec)
    new = [workload(identity(target, role), 2, gpu="B200") for role in ("prefill", "decode")]
    switched = replace(
        observed, workloads=[*observed.workloads, *new], service_revision=target, status=plan.status
    )
    assert message(plan_all(cluster, switched, NOW)) is None


def test_the_old_revision_counts_with_the_accelerators_that_it_has() -> None:
    cluster = scaled(total=39)

    assert message(plan_all(cluster, before(cluster, gpus=1), NOW)) is None
    over = message(plan_all(cluster, before(cluster, gpus=2), NOW))
    assert over is not None
    assert "needs 40 accelerators, 1 beyond budget.total 39" in over


@pytest.mark.parametrize(
    "cluster",
    [scaled(total=64), scaled(), scaled("Off", total=32), scaled(strategy="Recreate", total=32)],
    ids=["it fits", "no budget", "no autoscaler", "Recreate"],
)
def test_nothing_is_reported_where_no_budget_is_exceeded(cluster: PDCluster) -> None:
    plan = plan_all(cluster, before(cluster), NOW)

    assert message(plan) is None
    assert not plan.reports_first
    (started,) = [event for event in plan.events if event.reason == "RolloutStarted"]
    assert (started.warning, ":" in started.message) == (False, False)


def test_routers_are_no_accelerators() -> None:
    cluster = scaled(total=64)
    observed = before(cluster)
    routers = workload(identity(OLD, "router"), 3)
    beside = replace(observed, workloads=[*observed.workloads, routers])

    assert message(plan_all(cluster, beside, NOW)) is None
