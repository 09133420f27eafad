"""Sources of the model: image, volume, hub, and the node's cache."""

from tests.operator.pdcluster_api.manifests.rendering import by_name, engine_of, pod_of
from tests.schema.object_cases import Change, at, both, vllm

HUB = at(
    "spec.model",
    {
        "name": "m",
        "huggingFace": {"repo": "org/model", "revision": "refs/pr/1", "tokenSecret": "hub"},
    },
)
FOLDER = "/models/org--model--refs--pr--1"
CACHE = both(HUB, at("spec.model.nodeCache", "/var/cache/models"))
RESOURCES = at("spec.roles.decode.resources", {"limits": {"cpu": 2, "memory": "4Gi"}})


def models_volume(*changes: Change) -> dict[str, object]:
    return by_name(pod_of(*changes)["spec"]["volumes"])["models"]


def test_claimed_volume_is_mounted_read_only_and_the_path_is_below_it() -> None:
    claim = at("spec.model", {"name": "m", "path": "/llama/70b/", "pvc": {"claimName": "models"}})
    pod = pod_of(claim)["spec"]

    assert models_volume(claim) == {
        "name": "models",
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
    }
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod["containers"][0][
        "volumeMounts"
    ]
    assert engine_of(claim)["model"]["path"] == "/models/llama/70b"
    assert "initContainers" not in pod


def test_draft_model_is_in_the_image_or_on_the_claimed_volume() -> None:
    drafts = at(
        "spec.roles.decode.engine.speculation", {"method": "draft", "draftModel": "/llama/1b"}
    )
    claim = at("spec.model", {"name": "m", "path": "llama/70b", "pvc": {"claimName": "models"}})

    assert engine_of(drafts)["engine"]["speculation"] == {
        "method": "draft",
        "draftModel": "/llama/1b",
    }
    assert engine_of(claim, drafts)["engine"]["speculation"]["draftModel"] == "/models/llama/1b"


def test_fetch_has_the_workers_resources_and_rights_but_not_its_accelerator() -> None:
    pod = pod_of(HUB, RESOURCES, at("spec.roles.decode.pools.0.gpu", "H100"))["spec"]
    (fetch,), (worker,) = pod["initContainers"], pod["containers"]

    assert fetch["resources"] == {"limits": {"cpu": "2", "memory": "4Gi"}}
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert fetch["securityContext"] == worker["securityContext"]
    assert fetch["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_token_is_under_the_key_of_either_custom() -> None:
    (fetch,) = pod_of(HUB)["spec"]["initContainers"]
    env = by_name(fetch["env"])

    assert env["PDCLUSTER_TOKEN_SECRET"]["value"] == "hub"
    for variable, key in (("HF_TOKEN", "HF_TOKEN"), ("HUGGING_FACE_HUB_TOKEN", "token")):
        assert env[variable]["valueFrom"]["secretKeyRef"] == {
            "name": "hub",
            "key": key,
            "optional": True,
        }


def test_router_fetches_no_weights_into_a_folder_of_its_own() -> None:
    changes = (CACHE, at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]}))
    fetch = by_name(pod_of(*changes, role="router")["spec"]["initContainers"])["fetch-model"]

    assert by_name(fetch["env"])["PDCLUSTER_FETCH_WEIGHTS"]["value"] == "false"
    assert f"--target={FOLDER}--without-weights" in fetch["command"]
    assert engine_of(*changes, role="router")["model"]["path"] == f"{FOLDER}--without-weights"
    assert engine_of(*changes)["model"]["path"] == FOLDER


def test_the_download_has_no_flag_that_an_older_worker_image_does_not_know() -> None:
    changes = (HUB, at("spec.roles.router", {"pools": [{"name": "cpu", "replicas": 1}]}))
    for role in ("router", "decode"):
        fetch = by_name(pod_of(*changes, role=role)["spec"]["initContainers"])["fetch-model"]
        flags = [each.partition("=")[0] for each in fetch["command"] if each.startswith("--")]
        assert flags == ["--repo", "--revision", "--target"]


def test_workers_that_compute_download_adapters_of_the_hub_with_any_model() -> None:
    hub = {"repo": "org/sql", "revision": "v1", "tokenSecret": "lora"}
    adapters = [{"name": "own", "path": "lora/own"}, {"name": "sql", "huggingFace": hub}]
    claim = {"name": "m", "path": "llama", "pvc": {"claimName": "models"}, "adapters": adapters}
    routers = at("spec.roles.router.pools", [{"name": "cpu", "replicas": 1}])
    changes = vllm(), at("spec.model", claim), routers
    pod = pod_of(*changes)["spec"]
    fetch, engine = pod["initContainers"]

    assert fetch["name"] == "fetch-adapter-1"
    assert fetch["command"][3:] == [
        *("--adapter", "--repo=org/sql", "--revision=v1", "--target=/adapters/org--sql--v1")
    ]
    assert by_name(fetch["env"])["PDCLUSTER_TOKEN_SECRET"]["value"] == "lora"
    assert "emptyDir" in by_name(pod["volumes"])["adapters"]
    for container in (engine, pod["containers"][0]):
        assert by_name(container["volumeMounts"])["adapters"]["readOnly"]
    assert engine_of(*changes)["engine"]["vllm"]["adapters"] == {
        "own": "/models/lora/own",
        "sql": "/adapters/org--sql--v1",
    }
    router = pod_of(*changes, role="router")["spec"]
    assert "initContainers" not in router
    assert "adapters" not in by_name(router["volumes"])


def test_our_own_engine_has_the_folders_of_adapters_and_a_router_their_names() -> None:
    hub = {"repo": "org/sql", "revision": "v1"}
    adapters = [{"name": "own", "path": "lora/own"}, {"name": "sql", "huggingFace": hub}]
    claim = {"name": "m", "path": "llama", "pvc": {"claimName": "models"}, "adapters": adapters}
    changes = (
        at("spec.model", claim),
        at("spec.roles.router.pools", [{"name": "cpu", "replicas": 1}]),
    )
    paths = {"own": "/models/lora/own", "sql": "/adapters/org--sql--v1"}
    for role in ("prefill", "decode", "router"):
        model = engine_of(*changes, role=role)["model"]
        assert model["adapters"] == [*paths]
        assert model.get("adapterPaths") == (None if role == "router" else paths)
    pod = pod_of(*changes, role="decode")["spec"]
    assert [each["name"] for each in pod["initContainers"]] == ["fetch-adapter-1"]
    assert by_name(pod["containers"][0]["volumeMounts"])["adapters"]["readOnly"]
