"""Source of a worker pod's model: its image, a claimed volume, or a download at start."""

from dataclasses import dataclass, replace
from typing import Any

from pdcluster_api.manifests.objects import USER, Manifest
from pdcluster_schema.model import AdapterSpec, HuggingFaceSpec, ModelSpec

MODELS, ADAPTERS = "/models", "/adapters"
FETCH_CONTAINER = "fetch-model"
_VOLUME_SIZE = "2Ti"  # above the largest open weights, as a disk for them is
_TOKEN_KEYS = {"HF_TOKEN": "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN": "token"}
# variables, not flags, for what an older worker image does not know: it fetches all the same
_NO_WEIGHTS = {"name": "PDCLUSTER_FETCH_WEIGHTS", "value": "false"}
_TOKEN_SECRET = "PDCLUSTER_TOKEN_SECRET"


@dataclass(frozen=True)
class ModelSource:
    """path: the model's folder as the worker sees it; what the pod needs for it to be there."""

    path: str
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    init_containers: tuple[Manifest, ...] = ()


def model_source(model: ModelSpec, container: Manifest, *, weights: bool) -> ModelSource:
    """container: base of its init containers; weights: whether the pod reads them, else a download
    leaves them out, and all adapters
    """
    source = _model(model, container, weights=weights)
    fetches = [
        _fetch(f"fetch-adapter-{place}", each.hugging_face, container, ADAPTERS, "--adapter")
        for place, each in enumerate(model.adapters)
        if each.hugging_face is not None and weights
    ]
    if not fetches:
        return source
    return replace(
        source,
        volumes=(*source.volumes, _empty(ADAPTERS)),
        mounts=(*source.mounts, _mount(ADAPTERS, read_only=True)),
        init_containers=(*source.init_containers, *fetches),
    )


def _model(model: ModelSpec, container: Manifest, *, weights: bool) -> ModelSource:
    if model.hugging_face is not None:
        return _downloaded(model.hugging_face, model.node_cache, container, weights=weights)
    assert model.path is not None, "a model has a path or a repository"
    if model.pvc is None:
        return ModelSource(model.path)
    volume = {
        "name": _volume(MODELS),
        "persistentVolumeClaim": {"claimName": model.pvc.claim_name, "readOnly": True},
    }
    return ModelSource(on_volume(model.path), (volume,), (_mount(MODELS, read_only=True),))


def on_volume(path: str) -> str:
    return f"{MODELS}/{path.strip('/')}"


def adapter_path(model: ModelSpec, adapter: AdapterSpec) -> str:
    """As the engine sees it."""
    if adapter.hugging_face is not None:
        return f"{ADAPTERS}/{hub_folder(adapter.hugging_face)}"
    assert adapter.path is not None, "an adapter has a path or a repository"
    return adapter.path if model.pvc is None else on_volume(adapter.path)


def _downloaded(
    hub: HuggingFaceSpec, node_cache: str | None, container: Manifest, *, weights: bool
) -> ModelSource:
    path = f"{MODELS}/{hub_folder(hub)}"
    fetch = _fetch(FETCH_CONTAINER, hub, container, MODELS)
    if not weights:
        path += "--without-weights"
        fetch["command"][-1] = f"--target={path}"
        fetch["env"].append(_NO_WEIGHTS)
    mounts = (_mount(MODELS, read_only=True),)
    if node_cache is None:
        return ModelSource(path, (_empty(MODELS),), mounts, (fetch,))
    volume = {
        "name": _volume(MODELS),
        "hostPath": {"path": node_cache, "type": "DirectoryOrCreate"},
    }
    return ModelSource(path, (volume,), mounts, (_prepare(container), fetch))


def _fetch(
    name: str, hub: HuggingFaceSpec, container: Manifest, folder: str, *options: str
) -> Manifest:
    return {
        **container,
        "name": name,
        "command": [
            "python",
            "-m",
            "pdcluster_worker.fetch",
            *options,
            f"--repo={hub.repo}",
            f"--revision={hub.revision}",
            f"--target={folder}/{hub_folder(hub)}",
        ],
        "env": [*container["env"], *_token(hub)],
        "volumeMounts": [*container["volumeMounts"], _mount(folder, read_only=False)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def hub_folder(hub: HuggingFaceSpec) -> str:
    """One for each repository and revision: clusters share the cache."""
    return f"{hub.repo}--{hub.revision}".replace("/", "--")


def _token(hub: HuggingFaceSpec) -> list[dict[str, Any]]:
    """Variables with the token, by the Secret's key; a Secret has one of the keys, and the download
    says so where it has none.
    """
    if hub.token_secret is None:
        return []
    return [
        {"name": _TOKEN_SECRET, "value": hub.token_secret},
        *(
            {
                "name": name,
                "valueFrom": {
                    "secretKeyRef": {"name": hub.token_secret, "key": key, "optional": True}
                },
            }
            for name, key in _TOKEN_KEYS.items()
        ),
    ]


def _prepare(container: Manifest) -> Manifest:
    """Hands the folder to the worker's user: the kubelet makes it, as root, and volumes of a node
    know no fsGroup.  The one container that runs as root, with the one capability that this takes.
    """
    return {
        **container,
        "name": "own-node-cache",
        "command": ["python", "-c", f"import os; os.chown({MODELS!r}, {USER}, {USER})"],
        "volumeMounts": [*container["volumeMounts"], _mount(MODELS, read_only=False)],
        "securityContext": {
            **container["securityContext"],
            "runAsUser": 0,
            "runAsNonRoot": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
    }


def _volume(folder: str) -> str:
    return folder.strip("/")


def _empty(folder: str) -> Manifest:
    return {"name": _volume(folder), "emptyDir": {"sizeLimit": _VOLUME_SIZE}}


def _mount(folder: str, *, read_only: bool) -> Manifest:
    readable = {"readOnly": True} if read_only else {}
    return {"name": _volume(folder), "mountPath": folder, **readable}
