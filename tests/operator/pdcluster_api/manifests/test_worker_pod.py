"""The worker's pod: identity, files, probes, rights and how it ends."""

from typing import Any

import pytest

from pdcluster_api.manifests.worker_pod import worker_pod
from pdcluster_schema.load import parse
from tests.operator.pdcluster_api.manifests.rendering import (
    Manifest,
    by_name,
    engine_of,
    pod_of,
    worker_of,
    workload_of,
)
from tests.schema.object_cases import GOOD, Change, at, both, minimal, no_change, vllm

GPU = at("spec.roles.decode.pools.0.gpu", "B300")


def test_every_mount_has_its_volume_and_files_are_folders_that_follow_changes() -> None:
    secrets = both(
        at("spec.discovery.etcd", {"endpoints": ["etcd:2379"], "tlsSecret": "etcd-client"}),
        at("spec.service.apiKeySecret", "keys"),
    )
    pod = pod_of(secrets)["spec"]
    volumes = by_name(pod["volumes"])
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    sources = {path: volumes[mount["name"]] for path, mount in mounts.items()}

    assert len(mounts) == len(volumes) == len(pod["volumes"])
    assert sources["/etc/pdcluster/engine"]["configMap"]["name"].startswith("chat-decode-cpu-")
    assert sources["/etc/pdcluster/policy"]["configMap"]["name"] == "chat-policy"
    assert sources["/etc/pdcluster/tls"]["secret"]["secretName"] == "chat-pdc-tls"
    assert sources["/etc/pdcluster/etcd-tls"]["secret"]["secretName"] == "etcd-client"
    assert sources["/etc/pdcluster/api-keys"]["secret"] == {
        "secretName": "keys",
        "defaultMode": 0o440,
        "optional": True,
    }
    assert "optional" not in sources["/etc/pdcluster/tls"]["secret"]
    assert sources["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "emptyDir" in sources["/tmp"]
    assert all("subPath" not in mount for mount in mounts.values())
    assert all(mount.get("readOnly") for path, mount in mounts.items() if path.startswith("/etc"))


def test_prefill_workers_get_no_api_keys() -> None:
    volumes = by_name(
        pod_of(at("spec.service.apiKeySecret", "keys"), role="prefill")["spec"]["volumes"]
    )

    assert "api-keys" not in volumes


def test_authority_key_is_mounted_nowhere() -> None:
    volumes = pod_of()["spec"]["volumes"]

    assert "chat-pdc-ca" not in {volume.get("secret", {}).get("secretName") for volume in volumes}


CLAIMS = [
    {"name": "nic", "resourceClaimTemplateName": "nic"},
    {"name": "channel", "resourceClaimName": "domain"},
]
HARDWARE = both(
    at("spec.roles.decode.pools.0.gpu", "GB200"),
    at("spec.roles.decode.resourceClaims", CLAIMS),
    at("spec.roles.decode.sharedMemory", "65536Mi"),
    at("spec.roles.decode.startupTimeoutSeconds", 1801),
    at(
        "spec.roles.decode.resources.limits",
        {"rdma/ib": 4, "hugepages-2Mi": "1Gi", "memory": "8Gi", "cpu": 4},
    ),
)


@pytest.mark.parametrize(
    ("engine", "field", "container"),
    [(no_change, "containers", "worker"), (vllm(), "initContainers", "engine")],
    ids=["our own engine", "a stock engine"],
)
def test_what_computes_has_the_claims_and_resources_of_its_role(
    engine: Change, field: str, container: str
) -> None:
    spec = pod_of(HARDWARE, engine)["spec"]
    resources = by_name(spec[field])[container]["resources"]

    assert spec["resourceClaims"] == CLAIMS
    assert resources["claims"] == [{"name": "nic"}, {"name": "channel"}]
    assert resources["limits"] == {
        "rdma/ib": "4",
        "hugepages-2Mi": "1Gi",
        "memory": "8Gi",
        "cpu": "4",
        "nvidia.com/gpu": "1",
    }
    users = [each["name"] for each in all_containers(spec) if "claims" in each["resources"]]
    assert users == [container]
    assert "resourceClaims" not in pod_of(HARDWARE, engine, role="prefill")["spec"]


def all_containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


@pytest.mark.parametrize("engine", [no_change, vllm()], ids=["our own engine", "a stock engine"])
def test_shared_memory_and_time_to_start_are_those_of_the_role(engine: Change) -> None:
    spec = pod_of(HARDWARE, engine)["spec"]
    volume = by_name(spec["volumes"])["shared-memory"]["emptyDir"]
    probe = by_name(spec["containers"])["worker"]["startupProbe"]
    section = engine_of(HARDWARE, engine)["engine"].get("vllm", {})

    assert volume == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert (probe["failureThreshold"], probe["periodSeconds"]) == (361, 5)
    assert section.get("startupTimeoutSeconds") == (1801 if engine is not no_change else None)


def test_liveness_leaves_a_stalled_engine_time_to_get_on_again_or_its_worker_to_end() -> None:
    """A worker whose engine stalls ends by itself after 20 s; the kubelet is for a server process
    that hangs.
    """
    probe = worker_of()["livenessProbe"]

    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) > 20


def test_accelerator_is_a_limit_added_to_the_given_resources() -> None:
    resources = at(
        "spec.roles.decode.resources",
        {"requests": {"cpu": 4, "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
    )

    assert worker_of(resources)["resources"] == {
        "requests": {"cpu": "4", "memory": "64Gi"},
        "limits": {"memory": "64Gi"},
    }
    assert worker_of(resources, GPU)["resources"]["limits"] == {
        "memory": "64Gi",
        "nvidia.com/gpu": "1",
    }
    assert worker_of()["resources"] == {}


def test_a_worker_has_an_accelerator_for_each_rank_unless_given_otherwise() -> None:
    sizes = at("spec.engine", {"tensorParallelSize": 4, "pipelineParallelSize": 2})
    assert worker_of(sizes, GPU)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    more = at("spec.roles.decode.pools.0.gpusPerReplica", 4)
    assert worker_of(at("spec.engine.tensorParallelSize", 2), GPU, more)["resources"]["limits"] == {
        "nvidia.com/gpu": "4"
    }


def template(content: dict[str, Any], role: str | None = None) -> Change:
    return at(f"spec.roles.{role}.podTemplate" if role else "spec.podTemplate", content)


def test_role_template_comes_over_the_shared_one() -> None:
    changes = (
        template(
            {
                "metadata": {"annotations": {"a": "all", "b": "all"}},
                "spec": {"priorityClassName": "low"},
            }
        ),
        template(
            {"metadata": {"annotations": {"a": "decode"}}, "spec": {"priorityClassName": "high"}},
            "decode",
        ),
    )

    decode, prefill = pod_of(*changes), pod_of(*changes, role="prefill")
    assert (decode["spec"]["priorityClassName"], prefill["spec"]["priorityClassName"]) == (
        "high",
        "low",
    )
    assert (decode["metadata"]["annotations"]["a"], decode["metadata"]["annotations"]["b"]) == (
        "decode",
        "all",
    )


@pytest.mark.parametrize(
    "labels",
    [
        {"pdcluster.io/role": "prefill", "team": "x"},
        {"$patch": "replace", "team": "x"},
        {"pdcluster.io/cluster": None, "team": "x"},
    ],
    ids=["overridden", "replaced", "removed"],
)
def test_template_cannot_take_the_labels_that_the_pods_are_found_by(labels: dict[str, Any]) -> None:
    found = pod_of(template({"metadata": {"labels": labels}}))["metadata"]["labels"]

    assert found["pdcluster.io/role"] == "decode"
    assert found["pdcluster.io/cluster"] == "chat"
    assert found["team"] == "x"


def test_template_without_any_labels_still_has_ours() -> None:
    for content in (
        {"metadata": {"$patch": "delete"}},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": "x"}},
    ):
        assert pod_of(template(content))["metadata"]["labels"]["pdcluster.io/pool"] == "cpu"


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        ({}, "295"),  # 300 by default, of which the preStop hook takes 5
        ({"spec": {"terminationGracePeriodSeconds": 25}}, "20"),
        ({"spec": {"terminationGracePeriodSeconds": 4}}, "2"),
        ({"spec": {"containers": [{"name": "worker", "lifecycle": None}]}}, "300"),
        ({"spec": {"terminationGracePeriodSeconds": "soon"}}, None),  # the API server refuses it
    ],
)
def test_a_worker_knows_its_time_from_sigterm_on(content: Manifest, seconds: str | None) -> None:
    (worker,) = (each for each in pod_of(template(content))["spec"]["containers"])
    found = by_name(worker["env"]).get("PDCLUSTER_GRACE_SECONDS")
    assert found == (
        None if seconds is None else {"name": "PDCLUSTER_GRACE_SECONDS", "value": seconds}
    )


def test_pods_tell_type_and_number_of_the_accelerators_that_they_were_made_for() -> None:
    gpu, ranks = (
        at("spec.roles.decode.pools.0.gpu", "H200"),
        at("spec.engine.tensorParallelSize", 4),
    )
    marks = [pod_of(*changes)["metadata"]["annotations"] for changes in ((gpu,), (gpu, ranks))]

    assert [each["pdcluster.io/gpu"] for each in marks] == ["H200", "H200"]
    assert [each["pdcluster.io/gpus-per-replica"] for each in marks] == ["1", "4"]


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_no_volume_on_a_node_is_without_a_bound(change: Change) -> None:
    document = minimal()
    change(document)
    for role in document["spec"]["roles"]:
        document["spec"]["roles"][role].pop("podTemplate", None)  # it may add volumes
    document["spec"].pop("podTemplate", None)
    cluster = parse(document)
    for role, spec in cluster.spec.roles.present().items():
        workload = workload_of(cluster, role, spec.pools[0].name)
        template = worker_pod(cluster, workload, spec.pools[0], "worker:1", {})
        folders = [each["emptyDir"] for each in template["spec"]["volumes"] if "emptyDir" in each]
        assert folders
        assert all("sizeLimit" in each for each in folders)


def test_a_template_gives_a_volume_another_size() -> None:
    larger = {"name": "tmp", "emptyDir": {"sizeLimit": "100Gi"}}
    pod = pod_of(at("spec.podTemplate", {"spec": {"volumes": [larger]}}))

    assert larger in pod["spec"]["volumes"]
