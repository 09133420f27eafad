"""Attention by FlashInfer, where it is installed: its paged kernels read our cache by strides,
without a copy.

Keys of a layer are `cache[:, :, layer, 0]`, values `[.., 1]`: pages of the form
that FlashInfer calls HND, with equal strides.  It plans once for each step.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.model.ops.attention_sizes import AttentionSizes
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.paged_attention import Attention, TritonAttention
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.step_plan import StepPlan

WORKSPACE_BYTES = 128 << 20
"""Bytes that FlashInfer asks for, for its splits over keys."""


def make_attention(cache: Tensor, shape: AttentionShape, limits: StepLimits) -> Attention:
    """FlashInfer for chunks where it is installed and knows the heads; Triton for all else."""
    own = TritonAttention(cache, shape, AttentionSizes.of(shape, cache.dtype, limits.longest))
    if not cache.is_cuda or cache.dtype == torch.float32 or shape.head_dim not in (64, 128, 256):
        return own
    return (
        own
        if importlib.util.find_spec("flashinfer") is None
        else FlashInferAttention(cache, shape, own)
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """The block tables of some sequences, as FlashInfer reads them; on the host, int32 but for
    `rows`.

    row_starts:  [S + 1] rows before each sequence, of these sequences alone.
    page_starts: [S + 1] pages before each.  pages: their block ids, one after another.
    last_lengths: [S] tokens in each one's last page.
    rows: [rows] places of these rows in the step.
    """

    row_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_lengths: Tensor
    rows: Tensor


def chunk_pages(plan: StepPlan, block_size: int) -> Pages:
    """Pages of the plan's chunks.  plan: on the host."""
    first = plan.num_decodes
    contexts, lengths = plan.contexts[first:], plan.lengths[first:]
    counts = (contexts + block_size - 1) // block_size
    sequences = zip(plan.seats[first:].tolist(), counts.tolist(), strict=True)
    starts = zip(plan.firsts[first:].tolist(), lengths.tolist(), strict=True)
    return Pages(
        row_starts=_starts(lengths),
        page_starts=_starts(counts),
        pages=torch.cat([plan.tables[seat, :count] for seat, count in sequences]),
        last_lengths=contexts - (counts - 1) * block_size,
        rows=torch.cat(
            [torch.arange(start, start + count, dtype=torch.int64) for start, count in starts]
        ),
    )


class FlashInferAttention:
    """See `Attention`.

    Decodes stay with Triton's kernel, whose launches a graph can hold whatever the contexts.
    """

    name = "flashinfer and triton"

    def __init__(self, cache: Tensor, shape: AttentionShape, own: TritonAttention) -> None:
        import flashinfer

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._cache = cache
        self._shape = shape
        self._own = own
        self._rows = torch.empty(0, dtype=torch.long, device=cache.device)

    def begin(self, plan: StepPlan) -> None:
        """Plan the chunks of a step."""
        if plan.num_decodes == len(plan.firsts):
            return
        shape, pages = self._shape, chunk_pages(plan, self._cache.shape[4])
        self._wrapper.plan(
            pages.row_starts,
            pages.page_starts,
            pages.pages,
            pages.last_lengths,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._cache.shape[4],
            causal=True,
            sm_scale=shape.scaling,
            q_data_type=self._cache.dtype,
        )
        self._rows = pages.rows.to(self._cache.device)

    def attend(self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None) -> Tensor:
        """See `Operations.attend`.

        Layers with a window are Triton's: FlashInfer's plan of a step holds one window for all.
        """
        if window is not None:
            return self._own.attend(qkv, plan, layer, window)
        out = self._own.decodes(qkv, plan, layer)
        if plan.num_decodes == len(plan.firsts):
            return out
        rows = self._rows
        heads = self._shape.num_heads * self._shape.head_dim
        query = qkv[rows, :heads].view(-1, self._shape.num_heads, self._shape.head_dim)
        pair = self._cache[:, :, layer, 0], self._cache[:, :, layer, 1]
        out[rows] = self._wrapper.run(query, pair).view(-1, heads)
        return out


def _starts(counts: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
