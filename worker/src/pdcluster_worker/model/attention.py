"""Our attention function for transformers' own model code, and the attention of one step over the paged KV cache.

`register` makes transformers call `paged_attention` in every layer; it hands
the call to the object that the forward pass was given as `attend`: a
`PagedAttention` when serving, a `model.probe` when a model is loaded.  Prefill
chunks run one by one, decodes in batches of similar context length.
"""

from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.inputs import DecodeGroup, PrefillChunk, StepInputs
from pdcluster_worker.model.kv_cache import KVCache

ATTENTION_NAME = "pdcluster_paged"


class Attend(Protocol):
    """What does the attention of one forward pass."""

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """One layer.  query: [1, Hq, T, D]; key, value: [1, Hkv, T, D], rotated; returns [1, T, Hq, D]."""
        ...


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers.

    There is deliberately no mask function of that name: transformers then
    builds no mask at all (masking_utils, 'other custom attention').
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface; `attend` is among the keyword arguments that the model hands on from its own call."""
    attend: Attend | None = options.pop("attend", None)
    if attend is None:
        raise ModelError("the model's code does not hand keyword arguments on to its attention, which is how ours is reached")
    return attend(module, query, key, value, attention_mask=attention_mask, **options), None


class PagedAttention:
    """The attention of one step: writes the step's keys and values to the cache, then attends over the cache."""

    def __init__(self, inputs: StepInputs, cache: KVCache) -> None:
        self._inputs = inputs
        self._cache = cache

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, **_: Any) -> Tensor:
        """One layer; see `Attend`.  Other options were found harmless when the model was loaded."""
        layer = module.layer_idx
        self._cache.write(layer, self._inputs.write_rows, key[0], value[0])
        if self._inputs.only_group is not None:
            return self._decode(layer, self._inputs.only_group, query[0], scaling).unsqueeze(0)
        out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        for group in self._inputs.groups:
            out[group.tokens] = self._decode(layer, group, query[0][:, group.tokens], scaling)
        for chunk in self._inputs.chunks:
            part = slice(chunk.first, chunk.last)
            out[part] = self._prefill(layer, chunk, query[0, :, part], (key[0, :, part], value[0, :, part]), scaling)
        return out.unsqueeze(0)

    def _decode(self, layer: int, group: DecodeGroup, query: Tensor, scaling: float | None) -> Tensor:
        """One query token a sequence.  query: [Hq, B, D]; returns [B, Hq, D].

        The query heads that share a KV head are rows of one small query, so
        each key is loaded once for all of them [docs/behaviours.md, attention].
        """
        num_heads, batch, head_dim = query.shape
        num_kv_heads = self._cache.geometry.num_kv_heads
        packed = query.transpose(0, 1).reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        key, value = (rows.view(batch, num_kv_heads, -1, head_dim) for rows in self._cache.read(layer, group.read_rows))
        out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=group.mask, scale=scaling)
        return out.reshape(batch, num_heads, head_dim)

    def _prefill(self, layer: int, chunk: PrefillChunk, query: Tensor, own: tuple[Tensor, Tensor], scaling: float | None) -> Tensor:
        """A chunk of one sequence.  query: [Hq, T, D]; own: its keys and values [Hkv, T, D]; returns [T, Hq, D].

        Without earlier tokens the chunk's own keys are all there is; else its
        whole context is read from the cache.  KV heads play the batch and the
        query heads of each the heads, so nothing is repeated in memory.
        """
        num_kv_heads, head_dim = own[0].shape[0], query.shape[-1]
        packed = query.reshape(num_kv_heads, -1, query.shape[1], head_dim)
        if chunk.read_rows is not None:
            key, value = (rows.view(num_kv_heads, -1, head_dim)[:, : chunk.context] for rows in self._cache.read(layer, chunk.read_rows))
            own = key, value
        key, value = (part.unsqueeze(1).expand(-1, packed.shape[1], -1, -1) for part in own)
        causal = chunk.read_rows is None
        out = functional.scaled_dot_product_attention(packed, key, value, attn_mask=chunk.mask, is_causal=causal, scale=scaling)
        return out.reshape(-1, query.shape[1], head_dim).transpose(0, 1)
