"""The pod of a stock engine on GPUs, as docs/engines.md tells a platform engineer, line by line."""

from pdcluster_api.manifests.objects import Manifest
from tests.operator.pdcluster_api.manifests.rendering import by_name, pod_of
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


def test_rdma_of_the_pod_template_is_added_to_what_is_rendered() -> None:
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
