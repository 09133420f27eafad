"""Manifests of a workload that are wanted while the rest of an earlier one of its name ends."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from pdcluster_api.apiserver.observe import LATE_SECONDS, Live, observe, still_ending
from pdcluster_api.manifests.render import render_record, render_workload
from pdcluster_api.plan.observed.state import DiscoveryState
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_api.rendering import Records, Rendering, record_lost
from pdcluster_operator.reconcile.apply_plan import objects_of
from pdcluster_schema.labels import workload_labels
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import Workload, WorkloadId
from tests.operator import bodies as made
from tests.operator.differences import diff
from tests.operator.pdcluster_operator.reconcile.rendered import (
    MIXED,
    OWNER,
    SITE,
    cluster,
    live,
    pod,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


POD, ORPHAN = pod(), pod(owner=None)

PLAN = ClusterPlan(MIXED.revision, "mixed", (Workload(MIXED, 1),), ())


def kinds(spec: PDCluster, found: Live) -> list[str]:
    """Kinds wanted under the workload's name."""
    records = Records(spec, found, OWNER, "worker:1", has_client_certificate=False)
    rendering = Rendering(records, SITE, frozenset(still_ending(found, NOW)))
    return [
        manifest["kind"]
        for manifest in rendering.manifests(PLAN)
        if manifest["metadata"]["name"] == MIXED.name
    ]


def old(gpu: str = "cpu") -> list[made.Body]:
    """Record, StatefulSet and engine file as they were made for a gpu."""
    record = render_record(cluster(gpu), MIXED, OWNER, "worker:1")
    return [record, *render_workload(record, 1, OWNER)]


def test_nothing_of_a_workload_for_another_gpu_stays():
    found = live(*old("B200"), POD)
    assert kinds(cluster(), found) == []
    assert kinds(cluster("B200"), found) == ["ControllerRevision", "StatefulSet", "ConfigMap"]


def test_its_successor_waits_for_its_pods():
    assert kinds(cluster(), live(POD)) == ["ControllerRevision", "ConfigMap"]
    assert kinds(cluster(), live()) == ["ControllerRevision", "StatefulSet", "ConfigMap"]


def test_a_deleted_stateful_set_comes_back_from_its_snapshot_when_its_pods_are_gone():
    record, _, engine = old()
    assert kinds(cluster(), live(record, engine, POD)) == ["ControllerRevision", "ConfigMap"]
    assert kinds(cluster(), live(record, engine)) == [
        "ControllerRevision",
        "StatefulSet",
        "ConfigMap",
    ]


@pytest.mark.parametrize("left", [POD, ORPHAN], ids=["its own", "orphaned"])
def test_pods_that_a_stateful_set_has_or_adopts_hold_nothing_back(left: made.Body):
    assert still_ending(live(*old(), left), NOW) == {}
    assert still_ending(live(ORPHAN), NOW) == {}


def should_be_gone(seconds: float) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_pods_of_a_lost_node_hold_back_no_longer_than_their_grace_period():
    ending, stuck = (
        pod(1, deletionTimestamp=should_be_gone(60)),
        pod(0, deletionTimestamp=should_be_gone(-LATE_SECONDS)),
    )
    assert still_ending(live(ending, stuck), NOW) == {MIXED: 60 + LATE_SECONDS}
    assert kinds(cluster(), live(ending, stuck)) == ["ControllerRevision", "ConfigMap"]
    assert still_ending(live(stuck), NOW) == {}
    assert kinds(cluster(), live(stuck)) == ["ControllerRevision", "StatefulSet", "ConfigMap"]
    assert still_ending(live(ending, pod(2)), NOW) == {MIXED: None}  # that one was not deleted yet


@pytest.mark.parametrize(
    "stray", [ORPHAN, pod(owner=MIXED.name, kind="Job"), pod(owner="of-another-owner")]
)
def test_a_pod_that_only_has_our_labels_counts_for_nothing(stray: made.Body):
    seen = observe(live(stray), discovery=DiscoveryState(managed=True), faults={})
    assert (list(seen.workloads), still_ending(live(stray), NOW)) == ([], {})


def unrenderable(
    *children: made.Body, gpu: str = "cpu", plan: ClusterPlan = PLAN
) -> list[WorkloadId]:
    records = Records(cluster(gpu), live(*children), OWNER, "worker:1", has_client_certificate=None)
    return Rendering(records, SITE).unrenderable(plan)


def test_a_workload_that_runs_and_cannot_be_made_again_is_left_alone_and_reported():
    record, stateful_set, engine = old()
    assert unrenderable(stateful_set) == [MIXED]
    assert unrenderable(stateful_set, record) == unrenderable(stateful_set, engine) == []
    assert unrenderable() == []  # it does not run: it is made when the etcd's Secret is there
    assert (
        unrenderable(
            {
                **stateful_set,
                "metadata": {
                    **stateful_set["metadata"],
                    "deletionTimestamp": "2026-01-01T00:00:00Z",
                },
            }
        )
        == []
    )
    said = record_lost(MIXED, cluster())
    assert (said.object, said.reason) == (f"StatefulSet {MIXED.name}", "ApplyFailed")


OLDER, LEAVING = replace(MIXED, revision="0ddba110"), replace(MIXED, pool="gone")


def named(workload: WorkloadId, body: made.Body) -> made.Body:
    """Name an object made for MIXED as if for another workload."""
    labels = workload_labels(workload.cluster, workload.role, workload.pool, workload.revision)
    return {**body, "metadata": {**body["metadata"], "name": workload.name, "labels": labels}}


def test_a_pool_that_is_no_longer_declared_and_has_lost_everything_is_left_alone():
    _, stateful_set, _ = old()
    plan = replace(
        PLAN, workloads=(Workload(MIXED, 1), Workload(LEAVING, 1)), budgets={MIXED: 0, LEAVING: 0}
    )
    assert unrenderable(named(LEAVING, stateful_set), plan=plan) == [LEAVING]


@pytest.mark.parametrize(
    ("workload", "fix"),
    [
        (OLDER, "let the roll out end, or change a setting, so that others take its place"),
        (LEAVING, "it goes when all declared pools of its role are ready"),
        (replace(LEAVING, role="decode"), "it goes when all declared pools of its role are ready"),
        (
            MIXED,
            "make sure that Secret of-etcd of discovery.etcd.tlsSecret exists and that the "
            "operator may read it",
        ),
    ],
)
def test_the_message_of_a_lost_record_has_the_fix_of_its_case(workload: WorkloadId, fix: str):
    etcd = {"etcd": {"endpoints": ["etcd:2379"], "tlsSecret": "of-etcd"}}
    spec = cluster(discovery=etcd)
    of_its_revision = (
        workload if workload is OLDER else replace(workload, revision=revision_of(spec.spec))
    )
    assert record_lost(of_its_revision, spec).message.endswith(f"no new pod of it can start; {fix}")


def test_a_pool_that_only_stays_for_now_keeps_its_disruption_budget():
    record, stateful_set, engine = (named(LEAVING, body) for body in old())
    found = live(record, stateful_set, engine)
    records = Records(cluster(), found, OWNER, "worker:1", has_client_certificate=False)
    plan = replace(
        PLAN, workloads=(Workload(MIXED, 1), Workload(LEAVING, 1)), budgets={MIXED: 0, LEAVING: 0}
    )
    made_of = Rendering(records, SITE).manifests(plan)
    budgets = [
        manifest["metadata"]["name"]
        for manifest in made_of
        if manifest["kind"] == "PodDisruptionBudget"
    ]
    assert budgets == [MIXED.name, LEAVING.name]


def test_what_is_left_alone_is_not_deleted():
    _, stateful_set, engine = old()
    bodies = live(stateful_set, engine).children
    found = [{**body, "metadata": {**body["metadata"], "uid": "some"}} for body in bodies]
    assert [str(action) for action in diff(made.UID, [], found)] == [
        f"StatefulSet {MIXED.name}",
        f"ConfigMap {MIXED.name}",
    ]
    assert diff(made.UID, [], found, leave=objects_of(MIXED, live(stateful_set))) == []


def test_a_workload_of_another_gpu_is_not_left_alone():
    record, stateful_set, _ = old("B200")
    assert unrenderable(stateful_set, record) == []


def test_what_is_outdated_counts_as_gone():
    found = live(*old("B200"), POD)
    seen = observe(found, discovery=DiscoveryState(managed=True), faults={}, outdated={MIXED})
    assert [state.gone for state in seen.workloads] == [True]
    assert list(seen.records) == []
    assert [
        state.gone
        for state in observe(found, discovery=DiscoveryState(managed=True), faults={}).workloads
    ] == [False]
