"""Services, ServiceAccount, policy file, budgets, scaler and Secrets: their selectors
and contents.
"""

import pytest

from pdcluster_api.manifests.render import render_shared
from pdcluster_schema.workload import WorkloadId
from tests.operator.pdcluster_api.manifests.rendering import (
    OWNER,
    SITE,
    cluster_of,
    matches,
    pod_of,
    record_of,
    shared_of,
)
from tests.schema.object_cases import at

SERVING = "0a1b2c3d"
TWO_POOLS = at(
    "spec.roles.decode.pools", [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}]
)


def test_ingress_serves_the_decode_workers_of_one_revision() -> None:
    spec = shared_of(serving=SERVING)["Service", "chat"]["spec"]
    decode = {**pod_of()["metadata"]["labels"], "pdcluster.io/revision": SERVING}

    assert matches(spec["selector"], decode)
    assert not matches(spec["selector"], {**decode, "pdcluster.io/revision": "ffffffff"})
    assert not matches(
        spec["selector"],
        {**pod_of(role="prefill")["metadata"]["labels"], "pdcluster.io/revision": SERVING},
    )
    assert "publishNotReadyAddresses" not in spec


def test_ingress_of_an_older_revision_serves_the_role_that_it_had() -> None:
    manifests = render_shared(cluster_of(), OWNER, SITE, SERVING, serving_role="mixed")

    assert manifests[-1]["spec"]["selector"] == {
        "pdcluster.io/cluster": "chat",
        "pdcluster.io/role": "mixed",
        "pdcluster.io/revision": SERVING,
    }


CPU = {"pools": [{"name": "cpu", "replicas": 1}]}
PICKED = {"router": CPU, "picker": CPU}


def test_pool_of_an_older_revision_behind_routers_has_the_role_that_it_had() -> None:
    picker = at("spec.service.endpointPicker", {})
    old = at("spec.roles", {**PICKED, "mixed": CPU})
    new = at("spec.roles", {**PICKED, "prefill": CPU, "decode": CPU})
    record = record_of(picker, old, role="mixed")
    serving = record["metadata"]["labels"]["pdcluster.io/revision"]

    found = render_shared(cluster_of(picker, new), OWNER, SITE, serving, records=[record])

    (pool,) = [each for each in found if each["kind"] == "InferencePool"]
    assert pool["spec"]["selector"]["matchLabels"]["pdcluster.io/role"] == "mixed"


@pytest.mark.parametrize(
    ("is_wide", "revision"), [(False, {"pdcluster.io/revision": SERVING}), (True, {})]
)
def test_pool_of_another_picker_has_the_pods_of_the_ingress(
    is_wide: bool, revision: dict[str, str]
) -> None:
    picked = cluster_of(at("spec.service.endpointPicker", {"name": "epp"}))
    *_, pool, _, ingress = render_shared(picked, OWNER, SITE, SERVING, is_wide=is_wide)

    assert pool["kind"] == "InferencePool"
    assert pool["spec"]["selector"]["matchLabels"] == ingress["spec"]["selector"]
    assert ingress["spec"]["selector"] == {
        "pdcluster.io/cluster": "chat",
        "pdcluster.io/role": "decode",
        **revision,
    }


def test_each_workload_that_serves_has_a_budget_of_its_own() -> None:
    labels = pod_of(TWO_POOLS, pool="a")["metadata"]["labels"]
    workload = WorkloadId("chat", "decode", "a", labels["pdcluster.io/revision"])
    shared = render_shared(cluster_of(TWO_POOLS), OWNER, SITE, SERVING, budgets={workload: 3})
    (budget,) = [each for each in shared if each["kind"] == "PodDisruptionBudget"]
    spec = budget["spec"]

    assert budget["metadata"]["name"] == workload.name
    assert (spec["minAvailable"], spec["unhealthyPodEvictionPolicy"]) == (3, "AlwaysAllow")
    assert matches(spec["selector"], labels)
    assert not matches(spec["selector"], {**labels, "pdcluster.io/revision": "ffffffff"})
    assert not matches(spec["selector"], pod_of(TWO_POOLS, pool="b")["metadata"]["labels"])
