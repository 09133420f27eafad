"""Loads a model by transformers' code, for architectures that our decoder does not have.

A dry run checks that every layer calls our attention as we support it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.support import (
    OTHER_MODEL,
    Config,
    check_attention,
    check_kind,
    check_windows,
    context_limit,
)
from pdcluster_worker.model.ops.operations import AttentionShape

UNDERSTOOD_OPTIONS = {
    "scaling",
    "sliding_window",
    "attention_mask",
    "dropout",
    "position_ids",
    "is_causal",
    "use_cache",
    "cache_position",
}
# both passes multiply the same row in the same shapes: even bfloat16 agrees far better
MAX_RELATIVE_DIFFERENCE = 0.01

_PROBED_TOKENS = (2, 5, 8)


@dataclass(frozen=True, slots=True)
class Probed:
    attention: AttentionShape
    dtype: torch.dtype
    windows: tuple[int | None, ...]  # of each layer, in tokens; None = the whole context


class Probe:
    """Stands in for attention (`Attend`) and records what each layer requests."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.layers: dict[int, tuple[AttentionShape, torch.dtype]] = {}
        self.windows: dict[int, int | None] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """The result depends only on the token's own query, key and value, so on its position."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise ModelError(
                f"attention of layer {layer} runs twice or has no number: layers that share KV are "
                "not supported"
            )
        if (
            key.shape != value.shape
            or query.shape[-1] != key.shape[-1]
            or query.shape[1] % key.shape[1]
        ):
            raise ModelError(
                f"layer {layer} attends with query {tuple(query.shape)}, key {tuple(key.shape)}, "
                f"value {tuple(value.shape)}: "
                "keys and values must have one head size and divide the query heads"
            )
        self._check_options(layer, module, options)
        scaling = options.get("scaling")
        scaling = key.shape[3] ** -0.5 if scaling is None else float(scaling)
        shape = AttentionShape(query.shape[1], key.shape[1], key.shape[3], scaling)
        self.layers[layer] = shape, key.dtype
        repeats = query.shape[1] // key.shape[1]
        return (
            (query + (key + value).repeat_interleave(repeats, dim=1)).transpose(1, 2).contiguous()
        )

    def _check_options(self, layer: int, module: Any, options: dict[str, Any]) -> None:
        window = options.get("sliding_window")
        if window is not None and window < 1:
            raise ModelError(
                f"layer {layer} uses a sliding window of {window} tokens, which must be at least 1"
            )
        self.windows[layer] = (
            window if window is not None and window < self._max_model_len else None
        )
        if options.get("attention_mask") is not None:
            raise ModelError(f"layer {layer} brings its own attention mask, which is not supported")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise ModelError(f"layer {layer} is not causal, which is not supported")
        unknown = sorted(
            name
            for name in options.keys() - UNDERSTOOD_OPTIONS
            if options[name] is not None and options[name] is not False
        )
        if unknown:
            raise ModelError(
                f"layer {layer} asks attention for {', '.join(unknown)}, which is not supported"
            )


def probe(model: Any, num_layers: int, max_model_len: int) -> Probed:
    """Raises ModelError for what we cannot run."""
    # One token at position 5, with another neighbour and in another place.  A padding token's
    # embedding is zero, and so are its logits wherever it stands: then it is a later token.
    for token in _PROBED_TOKENS:
        first = Probe(max_model_len)
        after = _forward(model, first, token_ids=[token - 1, token], positions=[0, 5])[1]
        if after.any():
            break
    before = _forward(model, Probe(max_model_len), token_ids=[token, token + 1], positions=[5, 3])[
        0
    ]
    if set(first.layers) != set(range(num_layers)):
        raise ModelError(
            f"{len(first.layers)} of {num_layers} layers use our attention function: the others "
            "are not ordinary attention"
        )
    shapes = set(first.layers.values())
    if len(shapes) != 1:
        raise ModelError(
            f"layers differ in heads, head size, scaling or dtype ({', '.join(map(str, shapes))}): "
            "one KV geometry is needed"
        )
    if not (after - before).norm() <= MAX_RELATIVE_DIFFERENCE * after.norm():
        raise ModelError(
            "the model cannot be batched: a token's result depends on unrelated tokens of its "
            "step, or not on its position"
        )
    return Probed(*shapes.pop(), tuple(first.windows[layer] for layer in range(num_layers)))


def _forward(model: Any, attend: Probe, token_ids: list[int], positions: list[int]) -> Tensor:
    """Logits of every token, [T, vocab_size] float32."""
    with torch.inference_mode():
        try:
            out = model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                attend=attend,
            )
        except ModelError:
            raise
        except Exception as e:  # whatever a model type's code does when it cannot run this way
            raise ModelError(
                "the model's code fails on a flat batch with our attention function: "
                f"{type(e).__name__}: {e}"
            ) from e
    logits: Tensor = out.logits[0].float()
    return logits


# there is no mask function of that name on purpose: transformers then builds no mask
ATTENTION_NAME = "pdcluster_paged"


# query: [1, Hq, T, D]; key, value: [1, Hkv, T, D], rotated; returns [1, T, Hq, D]
Attend = Callable[..., Tensor]  # (module, query, key, value, **options)


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
    if scales := [name for name in loading["unexpected_keys"] if ".weight_scale" in name]:
        raise ModelError(
            f"{path}: {min(scales)} is a scale of quantized weights, and config.json has no "
            "quantization_config that says how to read them: copy the model's own config.json, "
            "take the model in 16 bits, or set engine.type: vllm"
        )
    return module.eval()
