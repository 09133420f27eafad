"""The PDCluster file of a model, as `pdctl init` writes it and `pdctl up MODEL` runs it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pdcluster_api.apiserver.kinds import API_VERSION
from pdcluster_api.errors import StartError
from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.faults import validated
from pdcluster_schema.model import HuggingFaceSpec
from pdcluster_schema.pdcluster import KIND
from pdcluster_schema.text import one_line
from pdctl.local.gpus import is_of_type, read_driver
from pdctl.local.machine import available_cores
from pdctl.local.model import downloaded_gguf, gguf_of, is_gguf, require_utf8

MODEL = (
    "a model's folder or GGUF file, or OWNER/NAME, OWNER/NAME@REVISION or, for one of its GGUF "
    "files, OWNER/NAME:QUANTIZATION or OWNER/NAME:FILE of the Hugging Face hub"
)
_REPOSITORY = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<gguf>[\w.-]+))?(@(?P<revision>.+))?",
    re.ASCII | re.DOTALL,
)
_FILE_ENDINGS = (".yaml", ".yml")
_NAME_LENGTH = 30  # with a role, a pool and a revision it still is a name of Kubernetes


@dataclass(frozen=True)
class ModelOptions:
    """Options of the file of a model; None = not given."""

    name: str | None = None
    prefill: int | None = None
    decode: int | None = None
    mixed: int | None = None
    dtype: str | None = None
    gpu: str | None = None
    engine: str | None = None

    def given(self) -> Iterator[str]:
        return (f"--{name}" for name, value in vars(self).items() if value is not None)


def is_cluster_file(model: str) -> bool:
    """True if a MODEL of the command line is a PDCluster file in place of a model."""
    path = Path(model).expanduser()
    return model == "-" or path.suffix in _FILE_ENDINGS or (path.is_file() and not is_gguf(path))


def document_of(model: str, options: ModelOptions) -> dict[str, Any]:
    """The object of a model.  Raises StartError."""
    source = _source(model)
    base = source["name"].rpartition("/")[2].lower()
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": options.name or _cluster_name(base)},
        "spec": {
            "model": source if options.dtype is None else {**source, "dtype": options.dtype},
            **({} if options.engine is None else {"engine": {"type": options.engine}}),
            "roles": _roles(options),
        },
    }


def file_text(model: str, document: dict[str, Any]) -> str:
    head = f"# Made by pdctl init {one_line(model)}\n"
    return head + yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


def _source(model: str) -> dict[str, Any]:
    """Fields of spec.model that say what it is; a GGUF file of the hub is downloaded."""
    path = Path(model).expanduser()
    if is_cluster_file(model) and (model == "-" or path.exists()):
        raise StartError(f"{model}: is a file already; give {MODEL}", exit_code=2)
    if path.is_dir():
        if gguf_of(path) is None and not (path / "config.json").is_file():
            raise StartError(
                f"{model}: the folder has no config.json, so it holds no model; give the one that "
                "has it",
                exit_code=2,
            )
        folder = path.resolve()
        require_utf8(folder)
        return {"name": folder.name, "path": str(folder)}
    if is_gguf(path):
        file = path.absolute()  # a link keeps its name: that of the hub's cache leads to a hash
        require_utf8(file)
        return {"name": file.stem, "path": str(file)}
    found = _REPOSITORY.fullmatch(model)
    is_name_of_file = path.suffix.lower() in (".gguf", *_FILE_ENDINGS)
    is_of_hub = found is not None and found["gguf"] is not None
    if not (path.exists() or is_of_hub) and (
        is_name_of_file or ("/" in model and path.parent.is_dir())
    ):
        raise StartError(f"no file at {model}; correct the path, or give {MODEL}", exit_code=2)
    if found is None:
        raise StartError(
            f"{model}: no file or folder is there, and it is no name of the hub; give {MODEL}, or "
            "a PDCluster file to `pdctl up`",
            exit_code=2,
        )
    hub = {name: value for name, value in found.groupdict().items() if value is not None}
    name, quantization = hub["repo"], hub.pop("gguf", None)
    if quantization is None:
        return {"name": name, "huggingFace": hub}
    file = downloaded_gguf(validated(HuggingFaceSpec, hub), quantization)
    return {"name": name, "path": str(file)}


def _cluster_name(base: str) -> str:
    words = re.sub("[^a-z0-9]+", "-", base).lstrip("-0123456789")
    return words[:_NAME_LENGTH].rstrip("-") or "model"


def _roles(options: ModelOptions) -> dict[str, Any]:
    """As given, else one worker of each kind where the machine has two devices for them."""
    gpu = options.gpu or NO_ACCELERATOR
    prefill, decode, mixed = options.prefill, options.decode, options.mixed
    if mixed is not None and (prefill, decode) != (None, None):
        raise StartError(
            "--mixed is for workers that do both; give it, or --prefill and --decode", exit_code=2
        )
    if (prefill, decode, mixed) == (None, None, None) and _num_devices(gpu) == 1:
        mixed = 1
    sizes = {"mixed": mixed} if mixed else {"prefill": prefill or 1, "decode": decode or 1}
    return {
        role: {"pools": [{"name": gpu.lower(), "gpu": gpu, "replicas": size}]}
        for role, size in sizes.items()
    }


def _num_devices(gpu: str) -> int:
    """Cores, or GPUs of the type, of this machine; at least 1."""
    if gpu == NO_ACCELERATOR:
        return available_cores()
    return max(1, sum(is_of_type(each, gpu) for each in read_driver().gpus))
