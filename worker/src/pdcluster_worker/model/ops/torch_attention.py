"""Attention on a GPU: long chunks of prompts by torch's own, decodes and short chunks by Triton's
kernels.

Torch's attention reads contiguous keys and is 2.5 times as fast as ours on a long prompt.
A whole prompt has them in its rows; those of a chunk with a context before it are copied from the
cache, which is little beside the products.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from pdcluster_worker.model.ops.attention_sizes import AttentionSizes
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.paged_attention import Attention, TritonAttention
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan

MIN_PAIRS = 1 << 20
"""Rows times context of the least chunk that pays for its launches."""


def make_attention(cache: Tensor, shape: AttentionShape, limits: StepLimits) -> Attention:
    """Torch's for long chunks in a narrow dtype; Triton's for all else."""
    own = TritonAttention(cache, shape, AttentionSizes.of(shape, cache.dtype, limits.longest))
    if not cache.is_cuda or cache.dtype == torch.float32:
        return own
    return TorchAttention(cache, shape, own)


@dataclass(frozen=True, slots=True)
class _LongChunk:
    """first, length: its rows.  blocks: of its context, on the device; None = its rows are all of
    it.
    """

    first: int
    length: int
    context: int
    blocks: Tensor | None


class TorchAttention:
    """See `Attention`."""

    name = "torch and triton"

    def __init__(self, cache: Tensor, shape: AttentionShape, own: TritonAttention) -> None:
        self._cache = cache
        self._shape = shape
        self._own = own
        self._long: list[_LongChunk] = []
        self._short_lengths: Tensor | None = None

    def begin(self, plan: StepPlan) -> None:
        """Note the long chunks of a step."""
        first = plan.num_decodes
        is_long = plan.lengths.long() * plan.contexts >= MIN_PAIRS
        is_long[:first] = False
        self._long = [self._chunk(plan, index) for index in is_long.nonzero().flatten().tolist()]
        self._short_lengths = None
        if self._long and not is_long[first:].all():
            # Triton's kernel computes no row of a chunk without length.
            short = plan.lengths.masked_fill(is_long, 0)
            self._short_lengths = short.to(self._cache.device)

    def attend(self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None) -> Tensor:
        """See `Operations.attend`.  Layers with a window are Triton's."""
        if window is not None or not self._long:
            return self._own.attend(qkv, plan, layer, window)
        if self._short_lengths is None:
            out = self._own.decodes(qkv, plan, layer)
        else:
            out = self._own.attend(qkv, replace(plan, lengths=self._short_lengths), layer)
        for chunk in self._long:
            out[chunk.first : chunk.first + chunk.length] = self._attend(qkv, chunk, layer)
        return out

    def _chunk(self, plan: StepPlan, index: int) -> _LongChunk:
        length, context = int(plan.lengths[index]), int(plan.contexts[index])
        blocks = None
        if context > length:
            count = -(-context // self._cache.shape[4])
            table = plan.tables[int(plan.seats[index]), :count].long()
            blocks = table.to(self._cache.device)
        return _LongChunk(int(plan.firsts[index]), length, context, blocks)

    def _attend(self, qkv: Tensor, chunk: _LongChunk, layer: int) -> Tensor:
        shape, dim = self._shape, self._shape.head_dim
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        rows = qkv[chunk.first : chunk.first + chunk.length].view(chunk.length, -1, dim)
        query, key, value = torch.split(rows.transpose(0, 1), (heads, kv_heads, kv_heads))
        if chunk.blocks is not None:
            key, value = (self._gathered(chunk, chunk.blocks, layer, part) for part in range(2))
        found = functional.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=causal_lower_right(chunk.length, chunk.context),
            scale=shape.scaling,
            enable_gqa=True,
        )
        return found[0].transpose(0, 1).reshape(chunk.length, -1)

    def _gathered(self, chunk: _LongChunk, ids: Tensor, layer: int, part: int) -> Tensor:
        """Keys (0) or values (1) of its context: [Hkv, context, D]."""
        blocks = self._cache[:, :, layer, part].index_select(0, ids)
        return blocks.transpose(0, 1).flatten(1, 2)[:, : chunk.context]
