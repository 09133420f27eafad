"""Checks from config.json alone that a model is a decoder with causal attention in every layer."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pdcluster_worker.errors import ModelError
from pdcluster_worker.system.fingerprint import gguf_fix, weights_files

Config = dict[str, Any]

CAUSAL_LM_SUFFIXES = ("ForCausalLM", "LMHeadModel")
RECURRENT_FIELDS = re.compile("mamba_|ssm_|linear_attn|linear_num_|rwkv_|conv_L_cache|lru_")
RECURRENT_TYPES = re.compile("mamba2?|falcon_mamba|rwkv|xlstm|recurrent_gemma|jamba|zamba2?|bamba")
# fields that a kind of model has, and what it is
KINDS_BY_FIELD = {
    "vision_config": "it is multimodal",
    "audio_config": "it is multimodal",
    "speech_config": "it is multimodal",
    "text_config": "it is multimodal",
    "vision_tower": "it is multimodal",
    "mm_vision_tower": "it is multimodal",
    "kv_lora_rank": "it uses multi-head latent attention",
    "qk_rope_head_dim": "it uses multi-head latent attention",
}
LAYER_KINDS = {"full_attention", "sliding_attention", "attention"}
SEQUENCE_LENGTH_ROPES = ("dynamic", "longrope")
OTHER_MODEL = (
    " (only decoder-only models with full or sliding attention can: set model.path to one, or "
    "engine.type: vllm, if vLLM serves this one)"
)


class UnsupportedArchError(Exception):
    pass


def read_config(folder: Path) -> Config:
    """Raises ModelError when the folder, the file or the weights are missing."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist: set model.path to a Hugging Face model folder "
            "(`make model` fetches one)"
        )
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json: model.path must be a Hugging Face model folder"
            f"{gguf_fix(folder)}"
        )
    try:
        config = json.loads(path.read_bytes())
    except OSError as e:
        raise ModelError(
            f"cannot read {path}: {e.strerror}: make the model folder readable for user id "
            f"{os.geteuid()}"
        ) from e
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from e
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path} names no model_type: model.path must be a Hugging Face model folder"
        )
    if not weights_files(folder):
        raise ModelError(
            f"{folder} has no weights (*.safetensors or pytorch_model*.bin): copy the model folder "
            "again"
        )
    return config


def context_limit(config: Config, max_model_len: int | None) -> int:
    """The lower one of max_position_embeddings and the setting."""
    limits = [limit for limit in (config.get("max_position_embeddings"), max_model_len) if limit]
    if not limits:
        raise ModelError("config.json names no max_position_embeddings: set engine.maxModelLen")
    return min(limits)


def check_kind(config: Config) -> None:
    """config: with the type defaults and `generates_text`.  Raises ModelError, all reasons."""
    reasons = [f"{kind} ({field})" for field, kind in KINDS_BY_FIELD.items() if config.get(field)]
    _refuse(config, [*_task(config), *reasons, *_recurrent(config), *_alibi(config)], OTHER_MODEL)


def check_attention(config: Config, max_model_len: int) -> None:
    """Raise ModelError where the attention is not causal attention, or too long for its rope."""
    _refuse(config, list(_attention(config)), OTHER_MODEL)
    _refuse(config, list(_rope(config, max_model_len)))


def check_windows(config: Config, windows: Sequence[int | None], max_model_len: int) -> None:
    """Raise ModelError where the code's windows (None = all) are not those of the config."""
    window = config.get("sliding_window")
    if not window or window >= max_model_len:
        return
    always = config.get("use_sliding_window") is not False
    slides = [kind == "sliding_attention" for kind in config.get("layer_types") or ()] or [
        always
    ] * len(windows)
    if [window if is_sliding else None for is_sliding in slides] != list(windows):
        reason = (
            f"sliding_window={window} is on, but its code does not ask attention for it as the "
            f"config says: set engine.maxModelLen to at most {window}, or the config's "
            "sliding_window to null"
        )
        _refuse(config, [reason])


def _refuse(config: Config, reasons: list[str], fix: str = "") -> None:
    """fix: empty where the reasons contain it."""
    if reasons:
        name = config["model_type"]
        raise ModelError(f"model type {name} cannot be served: {'; '.join(reasons)}{fix}")


def _task(config: Config) -> Iterator[str]:
    if config.get("is_encoder_decoder"):
        yield "it is an encoder-decoder (is_encoder_decoder)"
    for architecture in config.get("architectures") or ():
        if architecture.endswith("ForConditionalGeneration"):
            yield f"architectures names {architecture}, an encoder-decoder or multimodal model"
        elif not architecture.endswith(CAUSAL_LM_SUFFIXES):
            yield (
                f"architectures names {architecture}, a pooling or classification model that "
                "generates no text"
            )
    if not config["generates_text"]:
        yield "transformers has no causal language model of this type"


def _recurrent(config: Config) -> Iterator[str]:
    if RECURRENT_TYPES.fullmatch(config["model_type"]):
        yield "it has state-space or recurrent layers (model_type)"
    for field in sorted(config):
        if RECURRENT_FIELDS.match(field) and config[field]:
            yield f"it has state-space, linear-attention or convolution layers ({field})"
    for field in ("layer_types", "layers_block_type", "block_types"):
        others = set(config.get(field) or ()) - LAYER_KINDS
        if others:
            yield (
                f"{field} has layers that are not full attention "
                f"({', '.join(sorted(map(str, others)))})"
            )


def _alibi(config: Config) -> Iterator[str]:
    nested = config.get("attn_config")
    if (
        config.get("alibi")
        or (isinstance(nested, dict) and nested.get("alibi"))
        or config.get("position_embedding_type") == "alibi"
    ):
        yield "it uses ALiBi position biases (alibi)"
    elif config["model_type"] == "bloom":
        yield "it uses ALiBi position biases (every bloom does)"


def _rope(config: Config, max_model_len: int) -> Iterator[str]:
    rope = config.get("rope_parameters") or {}
    # Either one set of parameters, or one for each layer type.
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        limit = part.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        limit = limit or config.get("max_position_embeddings") or 0
        if part.get("rope_type") in SEQUENCE_LENGTH_ROPES and max_model_len > limit:
            # Its frequencies follow the longest sequence of the batch: a request's tokens would
            # depend on its neighbours.
            yield (
                f"rope_type {part['rope_type']} changes with the length past {limit} tokens: set "
                f"engine.maxModelLen to at most {limit}"
            )


def _attention(config: Config) -> Iterator[str]:
    if config.get("attn_logit_softcapping"):
        yield (
            f"it caps attention logits (attn_logit_softcapping={config['attn_logit_softcapping']})"
        )
    if any("attention_sink" in field and config[field] for field in config):
        yield "it uses attention sinks"
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        yield "its attention is bidirectional (is_causal, use_bidirectional_attention)"
