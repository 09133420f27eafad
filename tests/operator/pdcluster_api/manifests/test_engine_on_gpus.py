"""The pod of a stock engine on GPUs, as docs/engines.md tells a platform engineer, line by line."""

from pdcluster_api.manifests.objects import Manifest, policy_name
from tests.operator.pdcluster_api.manifests.rendering import by_name, pod_of, shared_of
from tests.schema.object_cases import HUB, Change, at, both, vllm

ON_GPU = both(vllm(tensorParallelSize=8), at("spec.roles.decode.pools.0.gpu", "B200"))


def engine_and_pod(*changes: Change) -> tuple[Manifest, Manifest]:
    """The engine's container and the pod that it is in."""
    pod = pod_of(ON_GPU, *changes)["spec"]
    return by_name(pod["initContainers"])["engine"], pod


def variables(container: Manifest) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def with_engine(**more: object) -> Change:
    """A change of the pod template for the engine's container."""
    return at("spec.podTemplate", {"spec": {"initContainers": [{"name": "engine", **more}]}})


def test_gpus_are_those_of_the_ranks_and_the_server_has_none() -> None:
    engine, pod = engine_and_pod()

    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8"
    (server,) = pod["containers"]
    assert "limits" not in server["resources"]
    assert {each["key"] for each in pod["tolerations"]} == {"nvidia.com/gpu"}


def test_shared_memory_is_bounded_and_seen_by_both_containers() -> None:
    engine, pod = engine_and_pod()

    (volume,) = [each for each in pod["volumes"] if each["name"] == "shared-memory"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in engine["volumeMounts"]


def test_shared_memory_grows_by_the_pod_template() -> None:
    larger = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    _, pod = engine_and_pod(at("spec.podTemplate", {"spec": {"volumes": [larger]}}))

    assert by_name(pod["volumes"])["shared-memory"] == larger


def test_engine_loads_for_an_hour_before_anything_restarts_it() -> None:
    engine, pod = engine_and_pod()
    (server,) = pod["containers"]

    startup = server["startupProbe"]
    assert startup["httpGet"]["path"] == "/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600
    assert "startupProbe" not in engine
    assert "readinessProbe" not in engine
    assert engine["livenessProbe"]["exec"]["command"][0] == "python3"


def test_side_channel_is_at_the_pods_address_and_open_to_workers_alone() -> None:
    engine, _ = engine_and_pod()
    policy = shared_of(ON_GPU)["NetworkPolicy", policy_name("chat")]["spec"]
    http, peers = policy["ingress"]

    assert variables(engine)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert variables(engine)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "8200"
    assert [each["port"] for each in http["ports"]] == [8000]
    assert "ports" not in peers
    assert peers["from"] == [{"podSelector": policy["podSelector"]}]


def test_http_and_kv_events_of_the_engine_are_on_loopback() -> None:
    engine, _ = engine_and_pod()
    command = engine["command"]

    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "tcp://127.0.0.1:8101" in command[command.index("--kv-events-config") + 1]
    assert "ports" not in engine


def test_token_of_the_hub_reaches_the_download_alone() -> None:
    hub = at("spec.model", {**HUB, "huggingFace": {**HUB["huggingFace"], "tokenSecret": "hub"}})
    engine, pod = engine_and_pod(hub)
    containers = by_name(pod["initContainers"])

    named = {
        name: {
            each["valueFrom"]["secretKeyRef"]["name"]
            for each in one["env"]
            if "secretKeyRef" in each.get("valueFrom", {})
        }
        for name, one in {**containers, "worker": pod["containers"][0]}.items()
    }
    assert named == {"fetch-model": {"hub"}, "engine": set(), "worker": set()}
    assert variables(engine)["HF_HUB_OFFLINE"] == "1"
    assert list(containers) == ["fetch-model", "engine"]


def test_compiled_kernels_have_a_folder_that_outlives_the_container() -> None:
    engine, pod = engine_and_pod()

    assert variables(engine)["HOME"] == "/tmp"
    assert engine["securityContext"]["readOnlyRootFilesystem"] is True
    (mount,) = [each for each in engine["volumeMounts"] if each["mountPath"] == "/tmp"]
    assert by_name(pod["volumes"])[mount["name"]] == {
        "name": "engine-tmp",
        "emptyDir": {"sizeLimit": "64Gi"},
    }


def test_rdma_comes_by_the_pod_template_beside_what_is_rendered() -> None:
    engine, pod = engine_and_pod(
        with_engine(
            resources={"limits": {"rdma/hca": 1}},
            securityContext={
                "runAsUser": 0,
                "runAsNonRoot": False,
                "capabilities": {"add": ["IPC_LOCK"]},
            },
        )
    )

    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": 1}
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsUser": 0,
        "runAsNonRoot": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_host_network_comes_by_the_pod_template() -> None:
    given = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    engine, pod = engine_and_pod(at("spec.podTemplate", {"spec": given}))

    assert given.items() <= pod.items()
    assert variables(engine)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
