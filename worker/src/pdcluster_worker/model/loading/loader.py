"""Loads a Hugging Face model folder so that its layers call our attention function.

Unsupported models are refused by config.json, then by a dry run.  No code of the folder runs.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model import attention
from pdcluster_worker.model.kv_cache import DTYPES
from pdcluster_worker.model.loading.probe import probe
from pdcluster_worker.model.loading.support import (
    OTHER_MODEL,
    Config,
    check_attention,
    check_kind,
    check_windows,
    read_config,
)
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.system.cpu_limit import available_threads
from pdcluster_worker.system.fingerprint import fingerprint

logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    geometry: KVGeometry
    weights: str  # fingerprint
    dtype: str  # of computation
    max_model_len: int
    vocab_size: int
    windows: tuple[int | None, ...]  # per layer; None = full attention
    length_note: str = ""  # why max_model_len was lowered

    @property
    def window(self) -> int | None:
        """Widest window in tokens, behind which blocks can be freed; None = full attention."""
        limited = [window for window in self.windows if window is not None]
        return max(limited) if len(limited) == len(self.windows) else None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """answer: logits of an inspection; `module` then has only weights (`model.arch_spec`)."""

    module: Any
    attention: AttentionShape
    info: ModelInfo
    answer: torch.Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        """In the model's dtype; the files may have another."""
        num_weights: int = sum(parameter.numel() for parameter in self.module.parameters())
        return num_weights * DTYPES[self.info.dtype].itemsize


def load_model(
    path: Path,
    dtype: DType = "auto",
    *,
    block_size: int,
    max_model_len: int | None = None,
    threads: int = 0,
) -> LoadedModel:
    """max_model_len: upper bound; None = the model's own.
    threads:       CPU threads of torch in this process; 0 = from the cgroup limit.
    Raises ModelError when the model is missing or cannot be served.
    """
    started = time.monotonic()
    torch.set_num_threads(threads or available_threads())
    config = _complete_config(path, read_config(path))
    check_kind(config)
    limit = context_limit(config, max_model_len)
    check_attention(config, limit)
    weights = fingerprint(path)
    kind = resolve_dtype(dtype)
    module = _read_weights(path, kind)
    try:
        found = probe(module, config["num_hidden_layers"], limit)
    except ModelError as e:
        raise ModelError(f"{e}{OTHER_MODEL}") from e
    check_windows(config, found.windows, limit)
    shape = found.shape
    geometry = KVGeometry(
        num_kv_heads=shape.attention.num_kv_heads,
        head_dim=shape.attention.head_dim,
        num_layers=config["num_hidden_layers"],
        block_size=block_size,
        dtype=_name(shape.dtype),
    )
    seconds = time.monotonic() - started
    logger.info(
        "loaded model path=%s dtype=%s threads=%d seconds=%.1f",
        path,
        _name(kind),
        torch.get_num_threads(),
        seconds,
    )
    info = ModelInfo(geometry, weights, _name(kind), limit, config["vocab_size"], found.windows)
    return LoadedModel(module, shape.attention, info)


def resolve_dtype(dtype: DType) -> torch.dtype:
    """`auto` is bfloat16 where this CPU multiplies it natively (2 to 4x faster), else float32."""
    if dtype != "auto":
        return torch.bfloat16 if dtype == "bfloat16" else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def context_limit(config: Config, max_model_len: int | None) -> int:
    """Lower one of max_position_embeddings and the setting."""
    limits = [limit for limit in (config.get("max_position_embeddings"), max_model_len) if limit]
    if not limits:
        raise ModelError("config.json names no max_position_embeddings: set engine.maxModelLen")
    return min(limits)


def _complete_config(path: Path, raw: Config) -> Config:
    """The config with its type's defaults and the file's own fields.  Raises ModelError."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"{path / 'config.json'}: transformers {transformers.__version__} cannot read model "
            f"type {raw['model_type']}: set model.path to a model of a type that it knows, or use "
            "a worker with a newer transformers"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # each config class validates in its own way
        reason = one_line(e)
        raise ModelError(
            f"{path / 'config.json'}: transformers cannot read model type {raw['model_type']}: "
            f"{reason}"
        ) from e
    complete: Config = {**raw, **config.to_dict()}
    # Some types have their own words for these (n_positions, n_layer); attributes go by the common
    # ones.
    complete |= {
        name: getattr(config, name, None)
        for name in ("max_position_embeddings", "num_hidden_layers", "vocab_size")
    }
    complete["generates_text"] = type(config) in AutoModelForCausalLM._model_mapping
    return complete


def _read_weights(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    attention.register()
    transformers_logging.disable_progress_bar()
    try:
        module, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except KeyError as e:
        raise ModelError(
            f"{path}: this model type's code does not use transformers' attention interface ({e}), "
            "so ours is not reached"
        ) from e
    except Exception as e:  # a torn or foreign file fails in many ways
        raise ModelError(f"cannot load weights of {path}: {type(e).__name__}: {e}") from e
    if missing := sorted(loading["missing_keys"]):
        # transformers would fill them with random numbers, other ones in each worker.
        raise ModelError(
            f"{path}: its weights lack {len(missing)} tensors of config.json, "
            f"{', '.join(missing[:3])} first: save it whole"
        )
    return module.eval()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
