"""Sizes and traits of a model for our decoder, from config.json as transformers reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from pdcluster_worker.model.loading.experts import ExpertNames, Mixture
from pdcluster_worker.model.loading.rotary import Parameters, Rotary
from pdcluster_worker.model.loading.support import Config, UnsupportedArchError
from pdcluster_worker.model.ops.operations import Activation, AttentionShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of a model type, and its defaults for fields that a config may leave out."""

    rope_theta: float = 10000.0
    rope_parameters: Parameters | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool | None = None  # qwen2: always; None = as `attention_bias` says
    mlp_bias: bool = False
    head_norms: bool = False  # each query and key head is normed (qwen3)
    offset_norms: bool = False  # norms store their weight less 1 (gemma)
    norms_round_once: bool = False
    scales_embedding: bool = False
    experts: ExpertNames | None = None
    has_sinks: bool = False  # each head has a score without a value
    # defaults of fields
    sliding_window: int | None = None
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    hidden_act: str = "silu"
    attention_bias: bool = False
    epsilon: float = 1e-6


FAMILIES: Mapping[str, Family] = {
    "llama": Family(mlp_bias=True),
    "mistral": Family(qkv_bias=False, sliding_window=4096),
    "qwen2": Family(qkv_bias=True, sliding_window=4096),
    "qwen3": Family(head_norms=True, sliding_window=4096, head_dim=128),
    "smollm3": Family(rope_theta=2e6, tie_word_embeddings=True, mlp_bias=True),
    "gemma": Family(
        tie_word_embeddings=True,
        offset_norms=True,
        norms_round_once=True,
        scales_embedding=True,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
    ),
    "mixtral": Family(
        rope_theta=1e6,
        qkv_bias=False,
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            each="block_sparse_moe.experts",
            gate="w1",
            up="w3",
            down="w2",
        ),
        epsilon=1e-5,
    ),
    "qwen3_moe": Family(
        head_norms=True,
        experts=ExpertNames(
            router="mlp.gate",
            each="mlp.experts",
            inner="moe_intermediate_size",
        ),
        sliding_window=4096,
    ),
    "gpt_oss": Family(
        rope_theta=150000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        norms_round_once=True,
        experts=ExpertNames(router="mlp.router", each="mlp.experts", is_stacked=True),
        has_sinks=True,
        sliding_window=128,
        head_dim=64,
        attention_bias=True,
        epsilon=1e-5,
    ),
}

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    family: Family
    activation: Activation
    attention: AttentionShape
    rotary: Rotary
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    epsilon: float
    is_tied: bool
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer, in tokens; None = full attention
    rotates: tuple[bool, ...]  # per layer: has positions
    embedding_scale: float | None  # None = 1
    mixture: Mixture | None = None  # None = no layer has experts

    def is_mixed(self, layer: int) -> bool:
        return self.mixture is not None and self.mixture.is_mixed[layer]

    @property
    def divided(self) -> dict[str, int]:
        """Counts, beside heads, that ranks of one stage divide."""
        dense = {"intermediate size": self.intermediate_size}
        if self.mixture is None:
            return dense
        return {"experts": self.mixture.count} | ({} if all(self.mixture.is_mixed) else dense)

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def read_architecture(config: Config, max_model_len: int) -> Architecture:
    """max_model_len: at most the config's own.  Raises UnsupportedArchError."""
    kind = config["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        raise UnsupportedArchError(f"model type {kind} is not one of {', '.join(FAMILIES)}")
    num_layers = _number(config, "num_hidden_layers")
    hidden_size, num_heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head_dim = _optional(config, "head_dim", int, family.head_dim) or hidden_size // num_heads
    num_kv_heads = _optional(config, "num_key_value_heads", int) or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedArchError("its heads do not divide")
    attention_bias = _flag(config, "attention_bias", default=family.attention_bias)
    has_qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    return Architecture(
        family=family,
        activation=_activation(config, family),
        attention=AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5),
        rotary=Rotary.read(config, head_dim, family.rope_theta, family.rope_parameters),
        hidden_size=hidden_size,
        intermediate_size=_number(config, "intermediate_size"),
        vocab_size=_number(config, "vocab_size"),
        epsilon=float(_required({"rms_norm_eps": family.epsilon, **config}, "rms_norm_eps", float)),
        is_tied=_flag(config, "tie_word_embeddings", default=family.tie_word_embeddings),
        has_qkv_bias=has_qkv_bias,
        has_out_bias=attention_bias and family.qkv_bias is None,
        has_mlp_bias=family.mlp_bias and _flag(config, "mlp_bias", default=False),
        windows=_windows(config, family, num_layers, max_model_len),
        rotates=_rotates(config, num_layers),
        embedding_scale=hidden_size**0.5 if family.scales_embedding else None,
        mixture=None if family.experts is None else _mixture(config, family.experts, num_layers),
    )


def _mixture(config: Config, names: ExpertNames, num_layers: int) -> Mixture:
    # one name is the other's alias
    field = "num_experts" if "num_experts" in config else "num_local_experts"
    count, chosen = _number(config, field), _number(config, "num_experts_per_tok")
    if chosen > count:
        raise UnsupportedArchError(f"num_experts_per_tok is {chosen}, of {count} experts")
    is_qwen = config["model_type"] == "qwen3_moe"
    dense = (_optional(config, "mlp_only_layers", list) or []) if is_qwen else []
    step = (_optional(config, "decoder_sparse_step", int, 1) or 1) if is_qwen else 1
    return Mixture(
        names,
        count,
        chosen,
        _number(config, names.inner),
        normalizes=_flag(config, "norm_topk_prob", default=False) if is_qwen else True,
        is_mixed=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)
        ),
    )


def _activation(config: Config, family: Family) -> Activation:
    if config["model_type"] == "gpt_oss":
        for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if config.get(name, value) != value:
                raise UnsupportedArchError(f"{name} is {config[name]}, not {value}")
        return "clamped_silu"
    name = str(config.get("hidden_act", family.hidden_act))
    if name == "gelu" and config["model_type"] == "gemma":
        name = "gelu_pytorch_tanh"  # as old gemma configs mean it
    if name not in ACTIVATIONS:
        raise UnsupportedArchError(f"hidden_act {name} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _windows(
    config: Config, family: Family, num_layers: int, max_model_len: int
) -> tuple[int | None, ...]:
    """A window of at least max_model_len counts as None."""
    kind = config["model_type"]
    if kind in ("llama", "gemma"):
        return (None,) * num_layers
    window = _optional(config, "sliding_window", int, family.sliding_window)
    if kind in ("mistral", "mixtral"):
        slides = [window is not None] * num_layers
    elif kind == "gpt_oss":
        slides = _sliding_layers(config, num_layers, window)
    elif not _flag(config, "use_sliding_window", default=False):
        slides = [False] * num_layers
    else:
        slides = _sliding_layers(config, num_layers, window)
    if any(slides) and (window is None or window < 1):
        raise UnsupportedArchError(f"sliding_window {window} is no window")
    shorter = window if window is not None and window < max_model_len else None
    return tuple(shorter if is_sliding else None for is_sliding in slides)


def _sliding_layers(config: Config, num_layers: int, window: int | None) -> list[bool]:
    kinds = _optional(config, "layer_types", list)
    if kinds is not None:
        if len(kinds) != num_layers:
            raise UnsupportedArchError(f"layer_types names {len(kinds)} of {num_layers} layers")
        return [kind == "sliding_attention" for kind in kinds]
    if config["model_type"] == "gpt_oss":
        return [layer % 2 == 0 for layer in range(num_layers)]
    if config["model_type"] == "qwen3_moe":
        return [window is not None] * num_layers
    if config["model_type"] == "smollm3":
        return [window is not None and not rotates for rotates in _rotates(config, num_layers)]
    first = _optional(config, "max_window_layers", int, 28) or 0
    return [window is not None and layer >= first for layer in range(num_layers)]


def _rotates(config: Config, num_layers: int) -> tuple[bool, ...]:
    if config["model_type"] != "smollm3":
        return (True,) * num_layers
    given = _optional(config, "no_rope_layers", list)
    if given is None:
        interval = _optional(config, "no_rope_layer_interval", int, 4) or 4
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if len(given) < num_layers:
        raise UnsupportedArchError(f"no_rope_layers names {len(given)} of {num_layers} layers")
    return tuple(map(bool, given[:num_layers]))


def _number(config: Config, name: str) -> int:
    value = _required(config, name, int)
    if value < 1:
        raise UnsupportedArchError(f"{name} is {value}")
    return value


def _flag(config: Config, name: str, *, default: bool) -> bool:
    value = _optional(config, name, bool, default)
    return default if value is None else value


def _required(config: Config, name: str, kind: type[T]) -> T:
    value = _optional(config, name, kind)
    if value is None:
        raise UnsupportedArchError(f"{name} is missing")
    return value


def _optional(config: Config, name: str, kind: type[T], default: T | None = None) -> T | None:
    value = config.get(name, default)
    kinds = (int, float) if kind is float else kind
    is_bool = isinstance(value, bool)
    if value is not None and (not isinstance(value, kinds) or is_bool != (kind is bool)):
        raise UnsupportedArchError(f"{name} is {value!r}")
    return cast(T | None, value)
