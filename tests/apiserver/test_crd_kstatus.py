"""Every phase of a PDCluster as kstatus reads it, which Flux waits by: from the API server, with
the statuses that are planned.
"""

from dataclasses import replace
from typing import Any

import pytest

from pdcluster_api.plan.cluster_status import plan_invalid
from pdcluster_api.plan.observed.state import DiscoveryState, Observed
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from tests.apiserver.objects import Json, Objects
from tests.operator.pdcluster_api.plan.clusters import plan_all, running
from tests.schema.object_cases import at, minimal

NOW = "2026-01-02T03:04:05Z"


def kstatus(body: Json) -> str:
    """The rules of sigs.k8s.io/cli-utils for a kind that it does not know, in their order."""
    status: dict[str, Any] = body.get("status", {})
    if "deletionTimestamp" in body["metadata"]:
        return "Terminating"
    if (
        status.get("observedGeneration", body["metadata"]["generation"])
        != body["metadata"]["generation"]
    ):
        return "InProgress"
    found = {each["type"]: each["status"] for each in status.get("conditions", ())}
    if found.get("Reconciling") == "True":
        return "InProgress"
    if found.get("Stalled") == "True":
        return "Failed"
    return "Current" if found.get("Ready", "True") == "True" else "InProgress"


def seen(body: Json, *, ready: int, members: int = 1) -> Observed:
    """The cluster with so many ready workers of each workload."""
    found = running(parse(body), generation=body["metadata"]["generation"], status=body["status"])
    discovery = DiscoveryState(managed=True, ready=members, desired=1)
    workloads = [replace(each, ready=ready) for each in found.workloads]
    return replace(found, discovery=discovery, workloads=workloads)


def write(clusters: Objects, status: Any) -> Json:
    answer = clusters.merge("chat", {"status": dict(status)}, "status")
    assert answer.accepted, answer.causes
    return clusters.get("chat")


def test_new_object_is_in_progress_before_the_operator_has_seen_it(clusters: Objects) -> None:
    created = clusters.create(minimal()).content

    assert created["status"] == clusters.get("chat")["status"] == {"observedGeneration": -1}
    assert kstatus(clusters.get("chat")) == "InProgress"


def test_object_is_current_when_all_is_as_declared_and_not_before(clusters: Objects) -> None:
    clusters.create(minimal())
    body = clusters.get("chat")
    for observed in (seen(body, ready=0, members=0), seen(body, ready=0)):
        body = write(clusters, plan_all(parse(body), observed, NOW).status)
        assert kstatus(body) == "InProgress"

    body = write(clusters, plan_all(parse(body), seen(body, ready=1), NOW).status)
    assert kstatus(body) == "Current"

    at("spec.service", {"port": 80})(body)
    assert clusters.replace(body).accepted
    assert kstatus(clusters.get("chat")) == "InProgress"


def test_object_that_needs_a_user_has_failed(clusters: Objects) -> None:
    clusters.create(minimal())
    body = clusters.get("chat")
    wrong = minimal()
    at("spec.roles.decode.pools.0.gpu", "V100")(wrong)
    with pytest.raises(InvalidObjectError) as refused:
        parse(wrong)

    assert (
        kstatus(
            write(clusters, plan_invalid(refused.value.faults, seen(body, ready=1), NOW).status)
        )
        == "Failed"
    )
