"""Workloads of an older operator go on under the names that they were recorded with."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.manifests.child_names import child_names, older_names
from pdcluster_api.manifests.render import render_record, render_shared, render_workload
from pdcluster_api.plan.result import ClusterPlan
from pdcluster_api.schema.revision import revision_of
from pdcluster_api.schema.workload import Workload, WorkloadId
from pdcluster_operator.reconcile.older_names import certificates_in_use, service_accounts_in_use
from pdcluster_operator.reconcile.records import Records
from pdcluster_operator.reconcile.rendering import Rendering
from pdcluster_operator.reconcile.tls import tls_step
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
NOW_CALLED, BEFORE = child_names(made.NAME), older_names(made.NAME)
OTHER = cluster(engine={"maxModelLen": 1024})
NEXT = WorkloadId(made.NAME, "mixed", "first", revision_of(OTHER.spec))


def recorded(names: Any = BEFORE) -> list[made.Body]:
    """Record, StatefulSet and engine file of a workload."""
    record = render_record(cluster(), MIXED, OWNER, "worker:1", names=names)
    return [record, *render_workload(record, 1, OWNER)]


def etcd_of_before() -> made.Body:
    """The record of an etcd that an older operator made."""
    stored = cluster(discovery={"etcd": {"storage": {"size": "1Gi"}}})
    found = render_shared(stored, OWNER, SITE, MIXED.revision)
    record = json.loads(
        json.dumps(next(each for each in found if each["kind"] == "ControllerRevision"))
    )
    record["data"]["statefulSet"]["spec"]["template"]["spec"]["serviceAccountName"] = (
        BEFORE.service_account
    )
    return dict(record)


def shared(*children: made.Body) -> set[tuple[str, str]]:
    """ServiceAccounts and policies that there should be."""
    records = Records(cluster(), live(*children), OWNER, "worker:1", has_client_certificate=False)
    plan = ClusterPlan(MIXED.revision, "mixed", (Workload(MIXED, 1),), (), {})
    manifests = Rendering(cluster(), OWNER, SITE, records).manifests(plan)
    return {
        (each["kind"], each["metadata"]["name"])
        for each in manifests
        if each["kind"] in ("ServiceAccount", "NetworkPolicy")
    }


def secrets(*children: made.Body) -> list[str]:
    """Those that are made at first, in their order."""
    return [
        manifest["metadata"]["name"] for manifest in tls_step(live(*children), OWNER, NOW).manifests
    ]


def test_a_new_cluster_has_unusual_names_only() -> None:
    names = {
        ("ServiceAccount", "chat-pdc"),
        ("NetworkPolicy", "chat-pdc"),
        ("NetworkPolicy", "chat-pdc-etcd"),
    }
    assert shared() == shared(*recorded(NOW_CALLED)) == names
    assert secrets() == secrets(*recorded(NOW_CALLED)) == ["chat-pdc-ca", "chat-pdc-tls"]


def test_what_a_recorded_workload_uses_stays_and_is_renewed_beside_the_new() -> None:
    assert {name for kind, name in shared(*recorded()) if kind == "ServiceAccount"} == {
        "chat",
        "chat-pdc",
    }
    assert secrets(*recorded()) == ["chat-ca", "chat-tls", "chat-pdc-ca", "chat-pdc-tls"]
    assert certificates_in_use(live(recorded()[1])) == (BEFORE, NOW_CALLED)  # its record was lost


def test_its_stateful_set_is_not_written_again() -> None:
    record, stateful_set, engine = recorded()
    records = Records(
        cluster(),
        live(record, stateful_set, engine),
        OWNER,
        "worker:1",
        has_client_certificate=False,
    )
    plan = ClusterPlan(MIXED.revision, "mixed", (Workload(MIXED, 1),), (), {})
    manifests = Rendering(cluster(), OWNER, SITE, records).manifests(plan)
    again = next(
        each
        for each in manifests
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == MIXED.name
    )
    assert again == stateful_set


def test_a_pool_of_the_same_revision_trusts_its_authority_and_another_the_new_one() -> None:
    records = Records(cluster(), live(*recorded()), OWNER, "worker:1", has_client_certificate=False)
    more = cluster(
        roles={
            "mixed": {
                "pools": [{"name": "first", "replicas": 1}, {"name": "second", "replicas": 1}]
            }
        }
    )
    second = WorkloadId(made.NAME, "mixed", "second", MIXED.revision)
    assert used(
        Records(more, records.live, OWNER, "worker:1", has_client_certificate=False).of(second)
    ) == ("chat", "chat-tls")
    assert used(
        Records(OTHER, records.live, OWNER, "worker:1", has_client_certificate=False).of(NEXT)
    ) == ("chat-pdc", "chat-pdc-tls")


def used(record: made.Body | None) -> tuple[str, str]:
    """ServiceAccount and Secret of a record's pods."""
    assert record is not None
    spec = record["data"]["statefulSet"]["spec"]["template"]["spec"]
    return spec["serviceAccountName"], next(
        each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == "tls"
    )


def test_with_the_last_of_them_the_old_service_account_goes() -> None:
    account = made.child("ServiceAccount", "chat", metadata={"labels": {}})
    assert service_accounts_in_use(live(account, *recorded()[:1])) == ("chat-pdc", "chat")
    assert service_accounts_in_use(
        live(account, pod(deletionTimestamp="2026-01-02T03:04:05Z"))
    ) == ("chat-pdc", "chat")
    assert service_accounts_in_use(live(account)) == ("chat-pdc",)
    assert [(action.verb.value, str(action)) for action in diff(made.UID, [], [account])] == [
        ("delete", "ServiceAccount chat")
    ]


def test_an_etcd_of_before_keeps_its_service_account_and_needs_no_certificates() -> None:
    assert service_accounts_in_use(live(etcd_of_before())) == ("chat-pdc", "chat")
    assert certificates_in_use(live(etcd_of_before())) == (NOW_CALLED,)


@pytest.mark.parametrize("account", ["chat", "ci-deployer"])
def test_a_service_account_that_a_pod_template_names_is_never_made(account: str) -> None:
    given = cluster(podTemplate={"spec": {"serviceAccountName": account}})
    workload = WorkloadId(made.NAME, "mixed", "first", revision_of(given.spec))
    assert service_accounts_in_use(live(render_record(given, workload, OWNER, "worker:1"))) == (
        "chat-pdc",
    )
