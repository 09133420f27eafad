"""A model's size by its config.json: its weights, and the shape of its KV."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster_api.errors import StartError
from pdcluster_schema.kv_shape import KVShape, language_config

_BYTES_OF_QUANTIZED = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "mxfp4": 0.53,
    "modelopt_fp4": 0.56,
    "nvfp4": 0.56,
}
"""Bytes of a weight with its scales: 4 bits, and a byte for each 32 (MXFP4) or 16 (NVFP4)."""
_SCALES = 0.03  # bytes of a 4-bit weight's share of a scale of two bytes and a zero, by 128
_ATTENTION_FAMILIES = "num_hidden_layers, hidden_size and num_attention_heads"


@dataclass(frozen=True)
class TransformerShape:
    """weights, active_weights: parameters, all and of one token; weight_bytes: of one parameter;
    is_weight_only: quantized weights meet activations of 16 bits;
    is_block_fp8: weights in FP8 with a scale for each block;
    heads, kv_heads: of attention, kv_heads 0 = one latent KV of all;
    pair_operations: of one layer's attention, for a token and one before it;
    max_length: tokens of a request, 0 = not said.
    """

    weights: float
    active_weights: float
    weight_bytes: float
    kv: KVShape
    experts: int
    experts_per_token: int
    is_block_fp8: bool
    is_weight_only: bool
    heads: int = 0
    kv_heads: int = 0
    pair_operations: int = 0
    max_length: int = 0

    def takes_tensor_ranks(self, number: int) -> bool:
        """Return whether each rank has whole heads, those of KV divided or repeated."""
        kv = self.kv_heads or number
        return self.heads % number == 0 and (kv % number == 0 or number % kv == 0)

    def weights_read(self, tokens: int, data_ranks: int = 1) -> float:
        """Parameters that a step of so many tokens reads: those of the experts that they meet, and
        what each data-parallel rank has of its own.
        """
        shared, routed = self._parts()
        missed = (1.0 - self.experts_per_token / self.experts) ** tokens if routed else 0.0
        return data_ranks * shared + routed * (1.0 - missed)

    def weights_of_rank(self, tensor_ranks: int, gpus: int) -> float:
        """Parameters on one of the GPUs of a worker, over all of which its experts lie."""
        shared, routed = self._parts()
        return shared / tensor_ranks + routed / gpus

    def attended(self, tokens: float) -> float:
        """Operations between the tokens of a prompt, in all layers."""
        seen = min(tokens, self.kv.window)
        windowed = seen * (tokens - seen / 2)
        layers = self.kv.num_whole * tokens**2 / 2 + self.kv.num_windowed * windowed
        return self.pair_operations * layers

    def _parts(self) -> tuple[float, float]:
        """Parameters that each token needs, and those of all experts among which it chooses."""
        if self.experts <= self.experts_per_token:
            return self.weights, 0.0
        unused = self.weights - self.active_weights
        routed = unused / (1.0 - self.experts_per_token / self.experts)
        return self.weights - routed, routed


def read_shape(folder: Path) -> TransformerShape:
    """Raises StartError (exit code 2)."""
    path = folder / "config.json"
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        message = f"{path}: cannot be read: {e}; give a folder with the model's config.json"
        raise StartError(message, exit_code=2) from e
    return shape_of(document, str(path))


def shape_of(document: Mapping[str, Any], name: str) -> TransformerShape:
    """Raises StartError (exit code 2) where it is no transformer that is known here."""
    try:
        config = language_config(document)
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        if min(layers, hidden, heads) < 1:
            raise ValueError(_ATTENTION_FAMILIES)
        return _of_config(config, layers, hidden, heads)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        message = f"{name}: has no {_ATTENTION_FAMILIES}; give a decoder-only transformer"
        raise StartError(message, exit_code=2) from e


def _of_config(config: Mapping[str, Any], layers: int, hidden: int, heads: int) -> TransformerShape:
    attention = _attention(config, hidden, heads)
    experts, chosen = _experts(config)
    mlp = 3 * hidden * int(config.get("intermediate_size") or 4 * hidden)
    if experts:
        mlp = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0)
    rest = 2 * hidden * int(config.get("vocab_size") or 0)
    return TransformerShape(
        weights=layers * (attention + mlp * (max(1, experts) + shared)) + rest,
        active_weights=layers * (attention + mlp * (max(1, chosen) + shared)) + rest,
        weight_bytes=_weight_bytes(config),
        kv=KVShape.of(config),
        experts=experts,
        experts_per_token=chosen,
        is_block_fp8=bool((config.get("quantization_config") or {}).get("weight_block_size")),
        is_weight_only=_is_weight_only(config.get("quantization_config") or {}),
        heads=heads,
        kv_heads=0
        if config.get("kv_lora_rank")
        else int(config.get("num_key_value_heads") or heads),
        pair_operations=2 * heads * _pair_width(config, hidden, heads),
        max_length=int(config.get("max_position_embeddings") or 0),
    )


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Parameters of a layer's attention."""
    if latent := int(config.get("kv_lora_rank") or 0):
        rope, plain = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
        values = int(config["v_head_dim"])
        query = int(config.get("q_lora_rank") or 0)
        queries = query * (hidden + heads * (rope + plain)) or hidden * heads * (rope + plain)
        keys = hidden * (latent + rope) + latent * heads * (plain + values)
        return queries + keys + heads * values * hidden
    dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * hidden * dim * (heads + kv_heads)


def _pair_width(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Numbers of a head that meet those of a token before: of its key and of its value."""
    if config.get("kv_lora_rank"):
        names = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return sum(int(config[name]) for name in names)
    return 2 * int(config.get("head_dim") or hidden // heads)


def _experts(config: Mapping[str, Any]) -> tuple[int, int]:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((int(config[name]) for name in names if config.get(name)), 0)
    chosen = config.get("num_experts_per_tok") or config.get("experts_per_token") or 1
    return experts, int(chosen) if experts else 0


def _weight_bytes(config: Mapping[str, Any]) -> float:
    quantization = config.get("quantization_config") or {}
    method = _method(quantization)
    if method in _BYTES_OF_QUANTIZED:
        return _BYTES_OF_QUANTIZED[method]
    if bits := _weight_bits(quantization):
        return bits / 8.0 + (_SCALES if bits < 8 else 0.0)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return 4.0 if dtype == "float32" else 2.0


def _method(quantization: Mapping[str, Any]) -> str:
    method = str(quantization.get("quant_method", "")).lower()
    return str(quantization.get("quant_algo", "")).lower() if method == "modelopt" else method


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the groups of compressed-tensors."""
    return list(dict(quantization.get("config_groups") or {}).values())


def _weight_bits(quantization: Mapping[str, Any]) -> int:
    """As AWQ, GPTQ and compressed-tensors say it; 0 = not said."""
    of_groups = [
        int((group.get("weights") or {}).get("num_bits") or 0) for group in _groups(quantization)
    ]
    return int(quantization.get("bits") or max(of_groups, default=0))


def _is_weight_only(quantization: Mapping[str, Any]) -> bool:
    if _method(quantization) in _BYTES_OF_QUANTIZED:
        return False
    return not any(group.get("input_activations") for group in _groups(quantization))
