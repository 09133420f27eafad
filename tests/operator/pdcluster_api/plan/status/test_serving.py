"""Workers that should answer requests, by role: of what serves now, or as declared while nothing
does.
"""

from dataclasses import replace

import pytest

from pdcluster_api.plan.cluster import ANSWERING, accelerators_of_pools, serving_replicas
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_schema.revision import revision_of
from pdcluster_schema.sections import AcceleratorSpec
from pdcluster_schema.workload import Workload
from tests.operator.pdcluster_api.plan.clusters import (
    NOW,
    identity,
    make_cluster,
    plan_all,
    pool,
    running,
)

NONE = dict.fromkeys(ANSWERING, 0)


def plan_of(
    *workloads: Workload, serving: str = "r1", role: str = "decode", ends_first: bool = False
) -> ClusterPlan:
    made = make_cluster()
    return replace(
        plan_all(made, running(made), NOW).plan,
        workloads=workloads,
        serving=serving,
        serving_role=role,
        ends_first=ends_first,
    )


def test_decode_workers_of_all_pools_answer_and_prefill_workers_do_not():
    cluster = make_cluster(decode=[pool(2, "a"), pool(3, "b")])

    assert serving_replicas(cluster, plan_all(cluster, running(cluster), NOW).plan) == NONE | {
        "decode": 5
    }


def test_in_a_roll_out_the_workers_of_the_revision_that_serves_count():
    """The declared workers are of another role, and answer nothing yet."""
    declared = make_cluster()
    plan = plan_of(
        Workload(identity("r1", "mixed"), 4),
        Workload(identity(revision_of(declared.spec)), 2),
        role="mixed",
    )

    assert serving_replicas(declared, plan) == NONE | {"mixed": 4}


@pytest.mark.parametrize(("role", "routers"), [("router", 2), ("decode", 0)])
def test_routers_count_when_the_service_leads_to_them(role: str, routers: int):
    plan = plan_of(Workload(identity("r1", "router"), 2), Workload(identity("r1"), 3), role=role)

    assert serving_replicas(make_cluster(), plan) == NONE | {"decode": 3, "router": routers}


def test_while_the_old_workers_end_first_the_declared_ones_count():
    assert serving_replicas(make_cluster(strategy="Recreate"), plan_of(ends_first=True)) == NONE | {
        "decode": 2
    }


def test_replicas_that_are_0_on_purpose_are_0():
    cluster = make_cluster(decode=[pool(0)])

    assert serving_replicas(cluster, plan_all(cluster, running(cluster), NOW).plan) == NONE


def test_accelerators_are_of_all_revisions_and_of_types_that_are_counted():
    """A worker of eight GPUs, one of a roll out that is not ready, and CPUs without a price."""
    cluster = make_cluster(
        prefill=[pool(1, "c")], decode=[pool(2, "b", gpu="B200", gpusPerReplica=8)]
    )
    new, old = identity(revision_of(cluster.spec), "decode", "b"), identity("r1", "decode", "b")
    cpu = identity(revision_of(cluster.spec), "prefill", "c")
    observed = running(cluster)
    plan = plan_of(Workload(new, 2), Workload(old, 1), Workload(cpu, 1))

    assert accelerators_of_pools(cluster, plan, observed) == {("decode", "b", "B200"): (24, 16)}
    priced = cluster.spec.model_copy(
        update={"accelerators": {"cpu": AcceleratorSpec(price_per_hour=0.5)}}
    )
    found = accelerators_of_pools(cluster.model_copy(update={"spec": priced}), plan, observed)
    assert found[("prefill", "c", "cpu")] == (1, 1)
