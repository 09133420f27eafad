"""Attention on a GPU: torch's for long whole prompts, Triton's for everything else.

torch took 0.63x of our time for 8192 tokens on an H200, but 1.2x for a chunk with a context.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.attention_sizes import AttentionSizes
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.paged_attention import Attention, TritonAttention
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan

MIN_ROWS = 1024  # shortest prompt that pays for the launches


def make_attention(cache: Tensor, shape: AttentionShape, limits: StepLimits) -> Attention:
    own = TritonAttention(cache, shape, AttentionSizes.of(shape, cache.dtype, limits.longest))
    if not cache.is_cuda or cache.dtype == torch.float32:
        return own
    return TorchAttention(cache, shape, own)


class TorchAttention:
    name = "torch and triton"

    def __init__(self, cache: Tensor, shape: AttentionShape, own: TritonAttention) -> None:
        self._cache = cache
        self._shape = shape
        self._own = own
        self._prompts: list[slice] = []
        self._other_lengths: Tensor | None = None

    def begin(self, plan: StepPlan) -> None:
        """Find the long prompts of the step."""
        first = plan.num_decodes
        is_long = (plan.lengths >= MIN_ROWS) & (plan.lengths == plan.contexts)
        starts, lengths = plan.firsts[is_long].tolist(), plan.lengths[is_long].tolist()
        self._prompts = [
            slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
        ]
        self._other_lengths = None
        if self._prompts and not is_long[first:].all():
            # Triton's kernel computes no row of a chunk without length.
            others = plan.lengths.masked_fill(is_long, 0)
            self._other_lengths = others.to(self._cache.device)

    def attend(self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None) -> Tensor:
        """Layers with a window use Triton."""
        if window is not None or not self._prompts:
            return self._own.attend(qkv, plan, layer, window)
        if self._other_lengths is None:
            out = self._own.decodes(qkv, plan, layer)
        else:
            out = self._own.attend(qkv, replace(plan, lengths=self._other_lengths), layer)
        for rows in self._prompts:
            out[rows] = self._attend(qkv[rows])
        return out

    def _attend(self, qkv: Tensor) -> Tensor:
        shape, length = self._shape, len(qkv)
        heads = qkv.view(1, length, -1, shape.head_dim).transpose(1, 2)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        query, key, value = torch.split(heads, sizes, dim=1)
        found = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=shape.scaling, enable_gqa=True
        )
        return found[0].transpose(0, 1).reshape(length, -1)
