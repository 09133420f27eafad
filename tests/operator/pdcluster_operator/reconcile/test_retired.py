"""Snapshots that are kept to go back to: their objects, what is read of them, and what is not."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from pdcluster_api.apiserver.observe import Live, is_retired, observe, workload_of
from pdcluster_api.apiserver.running_spec import as_it_runs
from pdcluster_api.manifests.render import render_record, render_workload
from pdcluster_api.plan.observed.state import DiscoveryState, Observed
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_api.rendering import Records, Rendering
from pdcluster_operator.writes.actions import Verb
from pdcluster_schema.labels import RETIRED
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.ports import HEAD_PORT
from pdcluster_schema.revision import revision_of, templates_of
from pdcluster_schema.workload import WorkloadId
from tests.operator import bodies as made
from tests.operator.differences import diff
from tests.operator.pdcluster_operator.reconcile import rendered
from tests.operator.pdcluster_operator.reconcile.spec_manifests import (
    OWNER,
    SITE,
    cluster,
    live,
    workloads,
)

OLD, NEW = cluster(), cluster(engine={"maxSequences": 65, "blockSize": 32})


def records(manifests: list[made.Body]) -> dict[WorkloadId, made.Body]:
    found = [each for each in manifests if each["kind"] == "ControllerRevision"]
    return {workload: each for each in found if (workload := workload_of(each))}


def replaced() -> tuple[Live, list[made.Body], list[made.Body]]:
    """After a roll out: what there is, of which the old revision has snapshots; and what was."""
    before = workloads(live([]), OLD)
    both = live([*before, *workloads(live(before), NEW)])
    after = workloads(both, NEW, retired=records(before))
    return live(after), before, after


def writes(found: Live, retired: Collection[WorkloadId]) -> list[tuple[Verb, str]]:
    """Find the actions on snapshots."""
    actions = diff(made.UID, workloads(found, NEW, retired=retired), found.children)
    return [(each.verb, each.name) for each in actions if each.kind.name == "ControllerRevision"]


def seen(found: Live) -> Observed:
    return observe(found, discovery=DiscoveryState(managed=True), faults={})


def test_snapshots_are_marked_while_all_else_of_their_workloads_is_deleted() -> None:
    before = workloads(live([]), OLD)
    both = live([*before, *workloads(live(before), NEW)])
    kept = records(before)

    actions = diff(made.UID, workloads(both, NEW, retired=kept), both.children)

    marked = [each for each in actions if each.verb is Verb.PATCH]
    assert {each.name for each in marked} == {body["metadata"]["name"] for body in kept.values()}
    assert all(each.patch == {"metadata": {"labels": {RETIRED: "true"}}} for each in marked)
    assert {(each.kind.name, each.name) for each in actions if each.verb is Verb.DELETE} == {
        (kind, workload.name) for kind in ("StatefulSet", "ConfigMap") for workload in kept
    }


def test_at_rest_a_snapshot_that_is_kept_costs_no_write_and_counts_as_no_workload() -> None:
    found, before, _ = replaced()
    kept = records(before)

    assert writes(found, kept) == []
    assert set(seen(found).retired) == set(kept)
    assert {each.revision for each in seen(found).records} == {revision_of(NEW.spec)}
    assert not {each.id for each in seen(found).workloads} & set(kept)
    names = {body["metadata"]["name"] for body in kept.values()}
    assert set(writes(found, ())) == {(Verb.DELETE, name) for name in names}


def test_workers_come_back_from_their_snapshot_as_they_were_under_a_newer_operator() -> None:
    found, before, _ = replaced()
    bound = as_it_runs(OLD, found)

    again = workloads(found, OLD, worker_image="worker:2")

    assert revision_of(bound.spec) == revision_of(OLD.spec)
    sets = [
        {each["metadata"]["name"]: each["spec"] for each in some if each["kind"] == "StatefulSet"}
        for some in (before, again)
    ]
    assert sets[0] == sets[1]
    assert not any(map(is_retired, records(again).values()))
    assert {each["metadata"]["labels"][RETIRED] for each in records(again).values()} == {"false"}


def sized(decode: int, prefill: int) -> PDCluster:
    pools = {"pools": [{"name": "cpu", "replicas": 1}]}
    sizes = {"prefill": prefill, "decode": decode}
    roles = {role: {**pools, "engine": {"maxSequences": size}} for role, size in sizes.items()}
    return cluster(roles={**roles, "router": pools})


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_a_role_that_changes_stays_in_the_revision_that_runs(first: int, second: int) -> None:
    """Though a snapshot of an earlier one has the other role as it is declared."""
    one, two = sized(first, first), sized(second, second)
    before = workloads(live([]), one)
    both = live([*before, *workloads(live(before), two)])
    found = live(workloads(both, two, retired=records(before)))
    running = revision_of(as_it_runs(two, found).spec)

    for mixed, role in ((sized(first, second), "decode"), (sized(second, first), "prefill")):
        bound = as_it_runs(mixed, found)
        assert (revision_of(bound.spec), list(templates_of(bound.spec))) == (running, [role])


def test_snapshots_of_workers_of_several_pods_open_no_port_and_are_no_workload() -> None:
    found, before, _ = replaced()
    kept = records(before)
    group = {"pods": 2, "followers": {}}
    several = [
        {**each, "data": {**each["data"], "group": group}}
        if each["kind"] == "ControllerRevision" and is_retired(each)
        else each
        for each in found.children
    ]
    groups = live(several)
    bound = as_it_runs(NEW, groups)
    ports = []
    for retired in (kept, {}):
        plan = ClusterPlan(revision_of(bound.spec), "router", (), (), tuple(retired))
        manifests = Rendering(Records(bound, groups, OWNER), SITE).manifests(plan)
        policies = [each for each in manifests if each["kind"] == "NetworkPolicy"]
        ports.append(f"'port': {HEAD_PORT}" in str(policies))

    assert ports == [False, True]
    assert not {each.id for each in seen(groups).workloads} & set(kept)


def test_a_snapshot_of_a_pool_that_is_declared_otherwise_is_not_gone_back_to() -> None:
    record = render_record(rendered.cluster("B200"), rendered.MIXED, rendered.OWNER, "worker:1")
    marked = {
        **record,
        "metadata": {
            **record["metadata"],
            "labels": {**record["metadata"]["labels"], RETIRED: "true"},
        },
    }
    found = rendered.live(marked, *render_workload(record, 1, rendered.OWNER)[1:])

    outdated = observe(
        found, discovery=DiscoveryState(managed=True), faults={}, outdated={rendered.MIXED}
    )

    assert (seen(found).retired, outdated.retired) == ([rendered.MIXED], [])
    other = replace(rendered.MIXED, pool="other")
    assert other not in seen(found).retired
