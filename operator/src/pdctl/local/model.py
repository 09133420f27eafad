"""Find the folder of a PDCluster's model on this machine, wherever Kubernetes would take it
from.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from pdcluster_api.errors import Fault, InvalidObjectError, StartError
from pdcluster_api.schema.pdcluster import PDCluster
from pdcluster_api.schema.sections import ModelSpec


@dataclass(frozen=True)
class FoundModel:
    """path: its Hugging Face folder.  origin: why this one, in words."""

    path: Path
    origin: str


def default_cache_dir() -> Path:
    """Folder where `make model` leaves the sample model, and where models are found by name."""
    return Path.home() / ".cache" / "pdcluster"


def cached_model(model: ModelSpec) -> Path:
    """The cache's folder for a model's name, whether it is there or not; `/` in a name becomes
    `--`.
    """
    return default_cache_dir() / model.name.replace("/", "--")


def find_model(cluster: PDCluster, source: Path, given: Path | None) -> FoundModel:
    """The model's folder: the one that is given, else the object's own path, else the cache's by
    the model's name.

    source: the PDCluster's file, from whose folder a relative path is taken; `~` is the home folder
    Raises StartError for a given folder that is not there, InvalidObjectError where none is found.
    """
    model = cluster.spec.model
    if given is not None:
        if not given.is_dir():
            raise StartError(f"--model-path: {_no_folder(given)}", exit_code=2)
        return FoundModel(given.absolute(), "--model-path")
    own = _own_path(model, source)
    if own is not None and own.is_dir():
        return FoundModel(own, "spec.model.path")
    cached = cached_model(model)
    if (cached / "config.json").is_file():
        return FoundModel(cached, f"the cache, by the name {model.name}")
    raise InvalidObjectError(
        [
            Fault(
                "spec.model",
                f"no folder of {model.name} is on this machine: {_tried(model, own)}",
                _fix(model),
            )
        ]
    )


def _no_folder(path: Path) -> str:
    """Reason why a path is no model folder, and the fix."""
    if not path.is_file():
        return f"no folder at {path}; correct the path"
    if path.suffix != ".gguf":
        return f"{path} is a file; give the folder that it is in"
    return (
        f"{path} is GGUF, which is not served; give the model's original folder, or convert it: "
        "transformers' from_pretrained(FOLDER, gguf_file=NAME), then save_pretrained(TARGET), for "
        "AutoModelForCausalLM and AutoTokenizer"
    )


def _own_path(model: ModelSpec, source: Path) -> Path | None:
    """The object's path, where that can be on this machine; one below a volume cannot."""
    if model.path is None or model.pvc is not None:
        return None
    return source.absolute().parent / Path(model.path).expanduser()


def _tried(model: ModelSpec, own: Path | None) -> str:
    if model.hugging_face is not None:
        object_text = "spec.model.huggingFace is downloaded on Kubernetes only"
    elif model.pvc is not None:
        object_text = f"spec.model.path is a folder of the volume {model.pvc.claim_name}"
    else:
        object_text = f"there is none at spec.model.path, {own}"
        if own is not None and own.is_file():
            object_text = f"of spec.model.path {_no_folder(own).partition(';')[0]}"
    return (
        f"--model-path is not given, {object_text}, and the cache has none at {cached_model(model)}"
    )


def _fix(model: ModelSpec) -> str:
    hub, cached = model.hugging_face, cached_model(model)
    give = "give it with `pdctl up FILE --model-path FOLDER`"
    if hub is None:
        return f"{give}, or put it at {cached} (`make model` puts the sample model there)"
    program = f"{sys.executable} -m pdcluster_worker.fetch"
    return (
        f"{give}, or download it: {program} --repo={hub.repo} --revision={hub.revision} "
        f"--target={cached}"
    )
