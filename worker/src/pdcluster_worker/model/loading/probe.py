"""Dry run of a loaded model: checks that every layer calls our attention as we support it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.errors import ModelError
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
class LayerShape:
    attention: AttentionShape
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Probed:
    """windows: of each layer, in tokens; None = the whole context."""

    shape: LayerShape
    windows: tuple[int | None, ...]


class Probe:
    """Stands in for attention (`model.attention.Attend`) and records what each layer requests."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.layers: dict[int, LayerShape] = {}
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
        self.layers[layer] = LayerShape(
            AttentionShape(query.shape[1], key.shape[1], key.shape[3], scaling), key.dtype
        )
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
    return Probed(shapes.pop(), tuple(first.windows[layer] for layer in range(num_layers)))


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
