"""Statuses and other writes of the operator fit the CRDs: nothing is refused, and nothing is lost
on the way.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.manifests.access import render_scaler
from pdcluster_api.manifests.objects import Owner
from pdcluster_api.plan.autoscale.explain import read_record
from pdcluster_api.plan.cluster_status import plan_invalid
from pdcluster_api.plan.observed.state import (
    DecisionInput,
    DecisionStep,
    DiscoveryState,
    Observed,
    Problem,
    ScalingDecision,
    WorkerDisaggregation,
    WorkerRecords,
)
from pdcluster_api.plan.status.autoscaled import recorded
from pdcluster_schema.conditions import CAPACITY_SHORT
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import parse
from tests.apiserver.objects import Json, Objects
from tests.operator.pdcluster_api.plan.clusters import plan_all, running
from tests.operator.pods import pod_state
from tests.schema.object_cases import at, minimal

NOW = "2026-01-02T03:04:05Z"
NEW = Observed(generation=1, status={}, discovery=DiscoveryState(managed=True, ready=0, desired=1))


def assert_stored_whole(clusters: Objects, planned: Mapping[str, Any]) -> None:
    answer = clusters.merge("chat", {"status": dict(planned)}, "status")

    assert answer.accepted, answer.causes
    assert clusters.get("chat")["status"] == planned


@pytest.mark.parametrize(
    "roles",
    [minimal()["spec"]["roles"], {"mixed": minimal()["spec"]["roles"]["decode"]}],
    ids=["1P1D", "mixed"],
)
@pytest.mark.parametrize("is_running", [False, True], ids=["new", "running"])
def test_planned_status_is_stored_whole(roles: Json, is_running: bool, clusters: Objects) -> None:
    document = minimal()
    at("spec.roles", roles)(document)
    clusters.create(document)
    planned = plan_all(parse(document), running(parse(document)) if is_running else NEW, NOW).status
    assert_stored_whole(clusters, planned)


@pytest.mark.parametrize("mode", ["Advise", "On"])
def test_decisions_of_the_autoscaler_are_stored_whole(mode: str, clusters: Objects) -> None:
    document = minimal()
    at("spec.autoscale", {"mode": mode, "budget": {"total": 8}})(document)
    clusters.create(document)
    inputs = (
        DecisionInput("decode", "kv_cache_usage_ratio", 0.9123, 0.75),
        DecisionInput("prefill", "prefill_queue_requests", None, 8.0),
    )
    steps = (
        DecisionStep("need", "decode", 1, 2, "kv_cache_usage_ratio 0.91 over 0.75: needs 2"),
        DecisionStep("pool", "decode/cpu", 1, 2, "the cheapest"),
    )
    decision = ScalingDecision({("prefill", "cpu"): 1, ("decode", "cpu"): 2}, inputs, steps)
    decided = replace(
        decision,
        at=datetime(2026, 1, 2, tzinfo=UTC),
        problems=(Problem(CAPACITY_SHORT, "cpu is short of 1 worker"),),
    )
    planned = plan_all(
        parse(document), replace(running(parse(document)), decision=decided), NOW
    ).status
    assert_stored_whole(clusters, planned)

    stored = clusters.get("chat")["status"]
    assert read_record(stored["autoscaling"]["lastDecisions"][0]) == decided
    assert recorded(stored, mode) == dict(decision.replicas)


def test_what_is_known_of_disaggregation_is_stored_whole(clusters: Objects) -> None:
    document = minimal()
    clusters.create(document)
    seen = running(parse(document))
    pods = {
        role: pod_state(state.id, f"{role}-0")
        for state in seen.workloads
        for role in [state.id.role]
    }
    said = {
        "decode-0": WorkerDisaggregation(
            "tcp", (("prefill-0", "dtype differs"),), 1, long_prompts=10, remote_ratio=0.5
        ),
        "prefill-0": WorkerDisaggregation("tcp", bytes_per_second=3_000_000_000),
    }
    workloads = [replace(state, pods=(pods[state.id.role],)) for state in seen.workloads]
    planned = plan_all(
        parse(document),
        replace(seen, workloads=workloads, worker_records=WorkerRecords(disaggregation=said)),
        NOW,
    ).status
    assert planned["disaggregation"].keys() == {
        "transport",
        "remoteShare",
        "bytesPerSecond",
        "numRefusedPairs",
        "refusedPairs",
    }
    assert_stored_whole(clusters, planned)


def test_a_roll_out_that_is_given_up_is_stored_whole(clusters: Objects) -> None:
    document, status = minimal(), {}
    clusters.create(document)
    before = running(parse(document))
    at("spec.engine", {"maxSequences": 65})(document)
    for now in (NOW, "2026-01-02T05:03:05Z"):
        status = dict(plan_all(parse(document), replace(before, status=status), now).status)
    assert status["rollout"]["givenUp"] is True
    assert_stored_whole(clusters, status)


def test_status_of_a_refused_object_is_stored_whole(clusters: Objects) -> None:
    document = minimal()
    clusters.create(document)
    at("spec.roles.decode.pools.0.gpu", "V100")(document)
    with pytest.raises(InvalidObjectError) as refused:
        parse(document)
    planned = plan_invalid(refused.value.faults, NEW, NOW).status
    assert_stored_whole(clusters, planned)


def test_rendered_scaler_and_its_status_are_stored_whole(
    clusters: Objects, scalers: Objects
) -> None:
    document = minimal()
    created = clusters.create(document).content["metadata"]
    made = render_scaler(
        Owner("chat", created["namespace"], created["uid"]), "decode", "cpu", replicas=1, seen=1
    )
    assert scalers.create(made).accepted
    (plan,) = [
        each
        for each in plan_all(parse(document), running(parse(document)), NOW).scalers
        if each.role == "decode"
    ]
    assert scalers.merge(made["metadata"]["name"], {"status": dict(plan.status)}, "status").accepted
    stored = scalers.get(made["metadata"]["name"])

    assert (stored["spec"], stored["status"]) == (made["spec"], plan.status)
    scale = scalers.get(made["metadata"]["name"], "scale")
    assert (scale["spec"]["replicas"], scale["status"]) == (1, plan.status)
