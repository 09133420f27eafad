"""Loads a model by transformers' code, for architectures that our decoder does not have."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.probe import Probed, probe
from pdcluster_worker.model.loading.support import (
    OTHER_MODEL,
    Config,
    check_attention,
    check_kind,
    check_windows,
    context_limit,
)

# there is no mask function of that name on purpose: transformers then builds no mask
ATTENTION_NAME = "pdcluster_paged"


class Attend(Protocol):
    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """query: [1, Hq, T, D]; key, value: [1, Hkv, T, D], rotated; returns [1, T, Hq, D]."""
        ...


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; the model passes `attend` on as a keyword argument."""
    attend: Attend | None = options.pop("attend", None)
    if attend is None:
        raise ModelError(
            "the model's code does not hand keyword arguments on to its attention, which is how "
            "ours is reached"
        )
    return attend(module, query, key, value, attention_mask=attention_mask, **options), None


def load_module(
    path: Path, raw: Config, dtype: torch.dtype, max_model_len: int | None
) -> tuple[Any, Probed, Config]:
    """The module in eval mode, its dry run, and its complete config.  Raises ModelError."""
    config = _complete_config(path, raw)
    check_kind(config)
    limit = context_limit(config, max_model_len)
    check_attention(config, limit)
    module = _read_weights(path, dtype)
    try:
        found = probe(module, config["num_hidden_layers"], limit)
    except ModelError as e:
        raise ModelError(f"{e}{OTHER_MODEL}") from e
    check_windows(config, found.windows, limit)
    return module, found, config


def _complete_config(path: Path, raw: Config) -> Config:
    """With the type's defaults and the file's own fields.  Raises ModelError."""
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
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    transformers_logging.disable_progress_bar()
    try:
        module, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
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
