"""Find the folder of a PDCluster's model on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_api.errors import StartError
from pdcluster_api.manifests.model_source import hub_folder
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.model import HuggingFaceSpec, ModelSpec
from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.download import converted, downloaded


@dataclass(frozen=True)
class FoundModel:
    """origin: the source of the path, as text."""

    path: Path
    origin: str


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "pdcluster"


def cached_model(model: ModelSpec) -> Path:
    return default_cache_dir() / model.name.replace("/", "--")


def find_model(cluster: PDCluster, source: Path, given: Path | None) -> FoundModel:
    """`given`, else the object's path, else the cache's folder of the model's name, else the hub's.

    source: the PDCluster's file; a relative path is relative to its folder
    Raises StartError for a given folder that does not exist or a download that failed,
    InvalidObjectError where none is found.
    """
    model = cluster.spec.model
    if given is not None:
        return FoundModel(folder_of(given, "--model-path: "), "--model-path")
    own = own_path(model, source)
    if own is not None and (own.is_dir() or is_gguf(own)):
        return FoundModel(folder_of(own), "spec.model.path")
    cached = cached_model(model)
    if (cached / "config.json").is_file():
        return FoundModel(cached, f"the cache, by the name {model.name}")
    if model.hugging_face is not None:
        target = default_cache_dir() / "models" / hub_folder(model.hugging_face)
        folder = downloaded(model.hugging_face, target, "--gguf=")
        origin = "the hub, downloaded" if folder == target else "the hub's own cache"
        return FoundModel(folder_of(folder), origin)
    raise InvalidObjectError(
        [
            Fault(
                "spec.model",
                f"no folder of {model.name} is on this machine: {_tried(model, own)}",
                _fix(model),
            )
        ]
    )


def with_adapters(cluster: PDCluster, source: Path) -> PDCluster:
    """The object with the folders of its adapters on this machine, each an absolute path.

    source: the PDCluster's file; a relative path is relative to its folder
    Raises InvalidObjectError, and StartError for a download that failed.
    """
    model, found = cluster.spec.model, []
    for index, adapter in enumerate(model.adapters):
        if adapter.path is None:
            assert adapter.hugging_face is not None, "an adapter has a path or a repository"
            target = default_cache_dir() / "adapters" / hub_folder(adapter.hugging_face)
            path = str(downloaded(adapter.hugging_face, target, "--adapter"))
            found.append(adapter.model_copy(update={"path": path, "hugging_face": None}))
            continue
        folder = source.absolute().parent / Path(adapter.path).expanduser()
        if model.pvc is not None or not (folder / "adapter_config.json").is_file():
            where = f"volume {model.pvc.claim_name}" if model.pvc else f"folder {folder}"
            raise InvalidObjectError(
                [
                    Fault(
                        f"spec.model.adapters[{index}].path",
                        f"no adapter_config.json of {adapter.name} is on this machine, in {where}",
                        "give the adapter's folder here, and no pvc",
                    )
                ]
            )
        found.append(adapter.model_copy(update={"path": str(folder)}))
    changed: dict[str, Any] = {"adapters": tuple(found)} if found else {}
    if model.runtime_adapters is not None:
        path = str(_runtime_folder(model.runtime_adapters.path, model, source))
        changed["runtime_adapters"] = model.runtime_adapters.model_copy(update={"path": path})
    adapted = model.model_copy(update=changed)
    return (
        cluster.model_copy(update={"spec": cluster.spec.model_copy(update={"model": adapted})})
        if changed
        else cluster
    )


def _runtime_folder(path: str, model: ModelSpec, source: Path) -> Path:
    """Raises InvalidObjectError where it is not on this machine."""
    folder = source.absolute().parent / Path(path).expanduser()
    if model.pvc is None and folder.is_dir():
        return folder
    where = f"in volume {model.pvc.claim_name}" if model.pvc else f"{folder}"
    reason = f"is no folder of this machine: {where}"
    fix = "give a folder that is here, and no pvc"
    raise InvalidObjectError([Fault("spec.model.runtimeAdapters.path", reason, fix)])


def folder_of(path: Path, option: str = "") -> Path:
    """An absolute folder: the path's own, or that which its GGUF file is made into.

    option: begins the message where there is none
    Raises StartError.
    """
    if not path.exists():
        raise StartError(f"{option}no folder at {path}; correct the path", exit_code=2)
    require_utf8(path.absolute(), option)
    if (gguf := gguf_of(path)) is not None:
        return converted(gguf.absolute(), default_cache_dir() / "gguf")
    if path.is_file():
        reason = f"{option}{path} is a file; give the folder that it is in"
        raise StartError(reason, exit_code=2)
    return path.absolute()


def downloaded_gguf(hub: HuggingFaceSpec, quantization: str) -> Path:
    """The GGUF file of a repository.  Raises StartError."""
    target = default_cache_dir() / "models" / f"{hub_folder(hub)}--{quantization.lower()}"
    file = gguf_of(downloaded(hub, target, f"--gguf={quantization}"))
    assert file is not None, "it has been downloaded"
    return file


def require_utf8(path: Path, option: str = "") -> None:
    """Raises StartError for a path that no file of YAML can hold."""
    name = os.fsencode(path)
    try:
        name.decode()
    except UnicodeDecodeError as e:
        reason = f"{option}{name!r}: the path is not UTF-8; rename it"
        raise StartError(reason, exit_code=2) from e


def gguf_of(path: Path) -> Path | None:
    """The path itself, or the one file of a folder without other weights; None = no GGUF.

    Raises StartError for a folder with several.
    """
    if path.is_file():
        return path if is_gguf(path) else None
    files = sorted(filter(is_gguf, path.iterdir()))
    if not files or any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise StartError(f"{path}: has several GGUF files, {names}; give one of them", exit_code=2)
    return files[0]


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def own_path(model: ModelSpec, source: Path) -> Path | None:
    """None for a path in a volume or an image."""
    if model.path is None or model.pvc is not None:
        return None
    return source.absolute().parent / Path(model.path).expanduser()


def _tried(model: ModelSpec, own: Path | None) -> str:
    if model.pvc is not None:
        object_text = f"spec.model.path is a folder of the volume {model.pvc.claim_name}"
    else:
        object_text = f"there is none at spec.model.path, {own}"
        if own is not None and own.is_file():
            object_text = f"spec.model.path is a file, {own}"
    return (
        f"--model-path is not given, {object_text}, and the cache has none at {cached_model(model)}"
    )


def _fix(model: ModelSpec) -> str:
    return (
        "give it with `pdctl up FILE --model-path FOLDER`, or put it at "
        f"{cached_model(model)} (`make model` puts the sample model there)"
    )
