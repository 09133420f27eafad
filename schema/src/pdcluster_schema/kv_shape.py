"""The KV that a model keeps of a sequence, by its config.json: MLA, windows, and layers without;
and where that has the fields of the language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# that of an audio model has a text_config in turn
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
_WINDOWED = ("sliding_attention", "chunked_attention")
_WHOLE = ("full_attention", "attention")
_ONE_KIND_IN_SO_MANY = {"gemma2": 2}  # of which one layer sees all tokens
_OTHER_CACHES = ("compress_ratios", "mamba_d_state", "ssm_state_size", "linear_num_key_heads")


def language_config(document: Any) -> dict[str, Any]:
    """Fields of the language model in a config.json, those that are nested over the others.

    Raises TypeError where it is no map.

    >>> language_config({"a": 1, "b": 1, "text_config": {"b": 2}, "llm_config": None})["b"]
    2
    """
    config: dict[str, Any] = document | {}
    for name in _NESTED:
        if isinstance(nested := config.get(name), dict):
            config |= nested
    return config


@dataclass(frozen=True, slots=True)
class KVShape:
    """num_kv_heads, head_dim: of a layer, MLA's latent counts as one head; 0 = not known.

    num_whole, num_windowed: layers that keep all tokens, and those that keep the last `window`
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    is_latent: bool
    num_whole: int
    num_windowed: int
    window: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "KVShape":
        heads = _integer(config, "num_attention_heads")
        kv_heads = _integer(config, "num_key_value_heads") or heads
        head_dim = _integer(config, "head_dim") or _integer(config, "hidden_size") // max(heads, 1)
        latent = _integer(config, "kv_lora_rank")
        if latent:
            kv_heads, head_dim = 1, latent + _integer(config, "qk_rope_head_dim")
        whole, windowed = _layers(config)
        window = _integer(config, "sliding_window") or _integer(config, "attention_chunk_size")
        return cls(
            num_layers=_integer(config, "num_hidden_layers"),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            is_latent=bool(latent),
            num_whole=whole if window else whole + windowed,
            num_windowed=windowed if window else 0,
            window=window,
        )

    @property
    def is_known(self) -> bool:
        return min(self.num_kv_heads, self.head_dim, self.num_whole + self.num_windowed) > 0

    def values(self, num_tokens: int, *, by_layer: bool = True) -> int:
        """Numbers that a sequence keeps in all layers.

        by_layer: each layer frees what its window leaves; otherwise the model does where all have
        one
        """
        seen = min(num_tokens, self.window) if self.window else num_tokens
        if not by_layer and self.num_whole:
            seen = num_tokens
        of_token = self.num_kv_heads * self.head_dim * (1 if self.is_latent else 2)
        return of_token * (self.num_whole * num_tokens + self.num_windowed * seen)

    def share(self, tensor_ranks: int) -> float:
        """Share of the KV that each rank holds: whole heads, at least one."""
        return -(-self.num_kv_heads // tensor_ranks) / self.num_kv_heads


def _layers(config: Mapping[str, Any]) -> tuple[int, int]:
    """Layers that keep all tokens, and those with a window; none where the kinds are not known."""
    layers = _integer(config, "num_hidden_layers") - _integer(config, "num_kv_shared_layers")
    kinds, pattern = config.get("layer_types"), config.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        kinds = kinds[:layers]
        return (
            sum(kind in _WHOLE for kind in kinds),
            sum(kind in _WINDOWED for kind in kinds),
        )
    if isinstance(pattern, str):
        return pattern.count("*"), 0
    if every := _integer(config, "full_attention_interval"):
        return layers // every, 0
    if any(config.get(name) for name in _OTHER_CACHES):
        return 0, 0
    if not _integer(config, "sliding_window") or config.get("use_sliding_window") is False:
        return layers, 0
    kind = str(config.get("model_type"))
    every = _integer(config, "sliding_window_pattern") or _ONE_KIND_IN_SO_MANY.get(kind, 0)
    whole = layers // every if every else min(layers, _integer(config, "max_window_layers"))
    return whole, layers - whole


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
