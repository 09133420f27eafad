"""A model's module built without transformers, from its inspected spec and mapped weight files.

It computes nothing: `model.families` reads its weights and rotary table.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.families import UnsupportedArchError, rotary_table, traits_of
from pdcluster_worker.model.kv_cache import DTYPES
from pdcluster_worker.model.loading.loader import LoadedModel, ModelInfo
from pdcluster_worker.model.ops.operations import AttentionShape

PRODUCT = "_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ArchSpec(msgspec.Struct, frozen=True, tag=True):
    info: ModelInfo
    attention: AttentionShape
    model_type: str
    hidden_act: str
    weights: list[str]  # parameter names as in the files, without a tied head
    epsilon: float  # of all norms
    rotates: list[bool]  # per layer
    embedding_scale: float | None  # None = 1
    rotary_scale: float  # factor of cosines and sines


class NoArchSpec(msgspec.Struct, frozen=True, tag=True):
    reason: str


@dataclass(frozen=True, slots=True)
class ArchAnswer:
    """tensors: `inverse_frequencies` [R] float32, `logits` of `logits_check`; empty if refused."""

    form: ArchSpec | NoArchSpec
    tensors: Mapping[str, Tensor]


class _Product(nn.Linear):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_parameter("bias", None)


class _Rotary(nn.Module):
    def __init__(self, inverse_frequencies: Tensor, scale: float) -> None:
        super().__init__()
        self._frequencies, self._scale = inverse_frequencies, scale

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [1, T], each [1, T, 2 * R] of like's dtype."""
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(like.dtype), (angles.sin() * self._scale).to(
            like.dtype
        )


# --- from transformers' module ------------------------------------------------------------------


def describe(loaded: LoadedModel, folder: Path) -> tuple[ArchSpec, dict[str, Tensor]]:
    """Raises UnsupportedArchError with the reason."""
    module: Any = loaded.module
    traits_of(module)
    parameters = dict(module.named_parameters())
    files = weights_by_file(folder)
    names = {name for held in files.values() for name in held}
    if missing := sorted(parameters.keys() - names):
        raise UnsupportedArchError(f"its files name weights otherwise: {', '.join(missing[:3])}")
    if HEAD not in parameters and module.lm_head.weight is not module.model.embed_tokens.weight:
        raise UnsupportedArchError("its head is no weight of its own")
    if {parameter.dtype for parameter in parameters.values()} != {DTYPES[loaded.info.dtype]}:
        raise UnsupportedArchError("its weights are not of one dtype")
    layers, rotary = module.model.layers, module.model.rotary_emb
    frequencies, scale = rotary.inv_freq.float().contiguous(), float(rotary.attention_scaling)
    _check_rotary(module.model, _Rotary(frequencies, scale), loaded.info.max_model_len)
    embedding_scale = getattr(module.model.embed_tokens, "scalar_embed_scale", None)
    form = ArchSpec(
        info=loaded.info,
        attention=loaded.attention,
        model_type=module.config.model_type,
        hidden_act=module.config.hidden_act,
        weights=list(parameters),
        epsilon=_epsilon(module),
        rotates=[bool(getattr(layer.self_attn, "use_rope", True)) for layer in layers],
        embedding_scale=None if embedding_scale is None else float(embedding_scale),
        rotary_scale=scale,
    )
    return form, {"inverse_frequencies": frequencies}


def _check_rotary(model: Any, ours: _Rotary, max_model_len: int) -> None:
    """Every position that can be served must agree."""
    stub = SimpleNamespace(embed_tokens=model.embed_tokens, rotary_emb=ours)
    tables = rotary_table(model, max_model_len), rotary_table(stub, max_model_len)
    if not all(torch.equal(theirs, found) for theirs, found in zip(*tables, strict=True)):
        raise UnsupportedArchError("its rotary embedding is not one of fixed frequencies")


def _epsilon(module: Any) -> float:
    found = {
        float(part.variance_epsilon if hasattr(part, "variance_epsilon") else part.eps)
        for part in module.modules()
        if _is_norm(part)
    }
    if len(found) != 1:
        raise UnsupportedArchError("its norms differ in epsilon")
    return found.pop()


def _is_norm(part: nn.Module) -> bool:
    return hasattr(part, "variance_epsilon") or hasattr(part, "eps")


# --- from the model's files ---------------------------------------------------------------------


def weights_by_file(folder: Path) -> dict[Path, list[str]]:
    """Names in each file that transformers reads.  Raises UnsupportedArchError without any."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        files = [whole]
    elif index.exists():
        files = sorted(
            {folder / name for name in json.loads(index.read_bytes())["weight_map"].values()}
        )
    else:
        raise UnsupportedArchError("its weights are not in safetensors files")
    held = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            held[file] = list(opened.keys())
    return held


def build(answer: ArchAnswer, folder: Path, block_size: int) -> LoadedModel:
    """Weights of the right dtype stay mapped from their files.

    Raises UnsupportedArchError for NoArchSpec, ModelError where the files have changed.
    """
    form = answer.form
    if isinstance(form, NoArchSpec):
        raise UnsupportedArchError(form.reason)
    info = replace(
        form.info, geometry=msgspec.structs.replace(form.info.geometry, block_size=block_size)
    )
    module = nn.Module()
    for name, tensor in _weights(form, folder):
        path, _, leaf = name.rpartition(".")
        _part(module, path).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    _finish(module, form, answer.tensors["inverse_frequencies"])
    return LoadedModel(module, form.attention, info, answer.tensors["logits"])


def _weights(form: ArchSpec, folder: Path) -> list[tuple[str, Tensor]]:
    """To save memory, `families` converts products of another dtype one by one."""
    dtype = DTYPES[form.info.dtype]
    found: dict[str, Tensor] = {}
    try:
        for file, names in weights_by_file(folder).items():
            with safe_open(file, framework="pt") as opened:
                for name in names:
                    if name in form.weights:
                        tensor = opened.get_tensor(name)
                        found[name] = tensor if name.endswith(PRODUCT) else tensor.to(dtype)
        return [(name, found[name]) for name in form.weights]
    except (OSError, KeyError, SafetensorError) as e:
        raise ModelError(f"cannot load weights of {folder}: {type(e).__name__}: {e}") from e


def _part(module: nn.Module, path: str) -> nn.Module:
    """The module at that path; missing ones are created."""
    for name in path.split("."):
        if name not in module._modules:
            kind = (
                _Product
                if name.endswith(("_proj", "lm_head"))
                else nn.ModuleList
                if name == "layers"
                else nn.Module
            )
            module.add_module(name, kind())
        module = module.get_submodule(name)
    return module


def _finish(module: Any, form: ArchSpec, inverse_frequencies: Tensor) -> None:
    """Set what is not a weight."""
    module.config = SimpleNamespace(model_type=form.model_type, hidden_act=form.hidden_act)
    model = module.model
    for name, part in model.named_modules():
        if name.endswith("norm"):
            part.variance_epsilon = form.epsilon
    for layer, rotates in zip(model.layers, form.rotates, strict=True):
        layer.self_attn.use_rope = rotates
    model.rotary_emb = _Rotary(inverse_frequencies, form.rotary_scale)
    model.embed_tokens.scalar_embed_scale = form.embedding_scale
    if HEAD not in form.weights:
        _part(module, "lm_head").register_parameter("weight", model.embed_tokens.weight)


# --- kept answers -------------------------------------------------------------------------------


def write_answer(answer: ArchAnswer, file: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in answer.tensors.items()}
    save_file(tensors, file, metadata={"form": msgspec.json.encode(answer.form).decode()})


def read_answer(file: Path) -> ArchAnswer:
    """Raises ValueError for a file that is not a complete answer."""
    try:
        with safe_open(file, framework="pt") as opened:
            form = msgspec.json.decode(opened.metadata()["form"], type=ArchSpec | NoArchSpec)
            names = opened.keys()  # it is no mapping
            return ArchAnswer(form, {name: opened.get_tensor(name).clone() for name in names})
    except (OSError, KeyError, TypeError, SafetensorError, msgspec.MsgspecError) as e:
        raise ValueError(f"{file} is no answer: {e}") from e
