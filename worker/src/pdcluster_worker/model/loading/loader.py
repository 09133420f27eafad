"""Loads a Hugging Face model folder: for our decoder, or as transformers' module.

Unsupported models are refused with the reason.  No code of the folder runs.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdcluster_worker.config.engine import KvCacheDtype, WeightQuantization
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.loading.architecture import FAMILIES, read_architecture
from pdcluster_worker.model.loading.checkpoint import Checkpoint, open_checkpoint
from pdcluster_worker.model.loading.quantization import Precision, WeightScheme, read_schemes
from pdcluster_worker.model.loading.support import (
    Config,
    UnsupportedArchError,
    check_attention,
    check_kind,
    check_windows,
    context_limit,
    read_config,
)
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.system.cgroups import available_threads
from pdcluster_worker.system.fingerprint import fingerprint

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    geometry: KVGeometry
    weights: str  # fingerprint, of the adapters too
    dtype: str  # of computation
    max_model_len: int
    vocab_size: int
    windows: tuple[int | None, ...]  # per layer; None = full attention
    length_note: str = ""  # why max_model_len was lowered
    adapters: tuple[str, ...] = ()  # names, in their order
    precision: str = ""  # of the weights of products: the dtype, or int8 or fp8_e4m3

    @property
    def window(self) -> int | None:
        """Widest window in tokens, behind which blocks can be freed; None = full attention."""
        limited = [window for window in self.windows if window is not None]
        return max(limited) if len(limited) == len(self.windows) else None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    info: ModelInfo
    attention: AttentionShape
    weight_bytes: int
    checkpoint: Checkpoint | None  # for our decoder
    module: Any = None  # transformers', in eval mode, without a checkpoint
    reason: str = ""  # why our decoder does not run it
    adapter_bytes: int = 0  # of `weight_bytes`

    def expert_bytes(self, num_rows: int) -> int:
        """Memory of one rank for the experts of a step of so many rows; 0 = it has none."""
        if self.checkpoint is None or (of := self.checkpoint.architecture).mixture is None:
            return 0
        return of.mixture.step_bytes(num_rows, of.hidden_size, self.checkpoint.dtype)


def load_model(
    path: Path,
    dtype: str,
    *,
    block_size: int,
    max_model_len: int | None = None,
    threads: int = 0,
    kv_dtype: KvCacheDtype = "auto",
    quantization: WeightQuantization = "none",
) -> LoadedModel:
    """dtype:         bfloat16 or float32.
    max_model_len: upper bound; None = the model's own.
    threads:       CPU threads of torch in this process; 0 = from the cgroup limit.
    Raises ModelError when the model is missing or cannot be served.
    """
    started = time.monotonic()
    torch.set_num_threads(threads or available_threads())
    config = read_config(path)
    kind = DTYPES[dtype]
    schemes = read_schemes(config)
    try:
        loaded = _load_checkpoint(
            path,
            config,
            kind,
            block_size=block_size,
            max_model_len=max_model_len,
            schemes=schemes,
        )
    except UnsupportedArchError as e:
        if schemes:
            raise ModelError(
                f"quantization_config: {e}, and quantized weights run by our own decoder alone: "
                "take the model in 16 bits, or set engine.type: vllm"
            ) from e
        family = FAMILIES.get(config["model_type"])
        if family is not None and family.has_sinks:
            raise ModelError(
                f"{e}, and attention sinks are computed by our own decoder alone: set engine.type: "
                "vllm"
            ) from e
        logger.info("the model is loaded by transformers' code, which is slower: %s", e)
        loaded = _load_module(path, config, kind, block_size, max_model_len)
        loaded = replace(loaded, reason=str(e))
    if quantization != "none":
        loaded = _quantized(loaded, quantization)
    geometry = stored_in(loaded.info.geometry, kv_dtype)
    loaded = replace(loaded, info=replace(loaded.info, geometry=geometry))
    text = "loaded model path=%s dtype=%s threads=%d seconds=%.1f"
    seconds = time.monotonic() - started
    logger.info(text, path, loaded.info.dtype, torch.get_num_threads(), seconds)
    return loaded


def stored_in(geometry: KVGeometry, kv_dtype: KvCacheDtype) -> KVGeometry:
    """geometry: as keys and values are computed."""
    dtype = {"auto": geometry.dtype, "bf16": "bfloat16"}.get(kv_dtype, kv_dtype)
    if dtype == geometry.dtype:
        return geometry
    return msgspec.structs.replace(geometry, dtype=dtype, computed_dtype=geometry.dtype)


def _quantized(loaded: LoadedModel, precision: Precision) -> LoadedModel:
    """Raises ModelError for weights that are quantized already, or not our decoder's."""
    field, checkpoint = f"engine.quantization is {precision}", loaded.checkpoint
    if checkpoint is None:
        raise ModelError(f"{field}, which needs our own decoder: {loaded.reason}; leave it out")
    if checkpoint.quantized or checkpoint.stacks:
        raise ModelError(
            f"{field}, and the model's weights are in {checkpoint.precision} already: leave it out"
        )
    checkpoint = replace(checkpoint, quantization=precision)
    return replace(
        loaded,
        info=replace(loaded.info, precision=precision),
        checkpoint=checkpoint,
        weight_bytes=checkpoint.num_bytes,
    )


def _load_checkpoint(
    path: Path,
    config: Config,
    dtype: torch.dtype,
    *,
    block_size: int,
    max_model_len: int | None,
    schemes: Sequence[WeightScheme],
) -> LoadedModel:
    longest = config.get("max_position_embeddings", "missing")
    if not isinstance(longest, int):
        raise UnsupportedArchError(f"max_position_embeddings is {longest}")
    limit = context_limit(config, max_model_len)
    architecture = read_architecture(config, limit)
    try:
        check_kind({**config, "generates_text": True})
        check_attention(config, limit)
        if config["model_type"] in ("llama", "mistral", "gemma", "mixtral"):
            check_windows(config, architecture.windows, limit)  # others' code asks as theirs says
    except (AttributeError, TypeError) as e:
        raise UnsupportedArchError(f"a field of config.json has a wrong type: {e}") from e
    weights = fingerprint(path)  # first: it says better what is wrong with a file
    checkpoint = open_checkpoint(path, architecture, dtype, schemes)
    shape, name = architecture.attention, str(dtype).removeprefix("torch.")
    sizes = shape.num_kv_heads, shape.head_dim, architecture.num_layers, block_size
    info = ModelInfo(
        KVGeometry(*sizes, name),
        weights,
        name,
        limit,
        architecture.vocab_size,
        architecture.windows,
        precision=checkpoint.precision,
    )
    return LoadedModel(info, shape, checkpoint.num_bytes, checkpoint)


def _load_module(
    path: Path, config: Config, dtype: torch.dtype, block_size: int, max_model_len: int | None
) -> LoadedModel:
    from pdcluster_worker.model.loading import transformers_loader

    module, probed, complete = transformers_loader.load_module(path, config, dtype, max_model_len)
    shape, name = probed.attention, str(dtype).removeprefix("torch.")
    sizes = shape.num_kv_heads, shape.head_dim, complete["num_hidden_layers"], block_size
    info = ModelInfo(
        KVGeometry(*sizes, str(probed.dtype).removeprefix("torch.")),
        fingerprint(path),
        name,
        context_limit(complete, max_model_len),
        complete["vocab_size"],
        probed.windows,
        precision=name,
    )
    num_bytes = sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize
    return LoadedModel(info, shape, num_bytes, None, module)
