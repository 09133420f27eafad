"""Attention by Triton kernels: split-K decodes with a merge, and tiled prefill chunks."""

import math
from typing import Protocol

import torch
from torch import Tensor

from pdcluster_worker.model.ops.attention_sizes import AttentionSizes, power_of_two
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.triton_kernels import attention
from pdcluster_worker.model.step_plan import StepPlan

_LOG2_E = math.log2(math.e)  # the kernels' exponentials are of base 2


class Attention(Protocol):
    name: str

    def begin(self, plan: StepPlan) -> None:
        """Prepare for an eager step.  plan: on the host."""
        ...

    def attend(
        self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None
    ) -> Tensor: ...


class TritonAttention:
    name = "triton"

    def __init__(self, cache: Tensor, shape: AttentionShape, sizes: AttentionSizes) -> None:
        if not cache.is_contiguous():
            raise ValueError("the KV cache must be contiguous")
        self._cache = cache
        self._shape = shape
        self._sizes = sizes
        self._splits = {
            "split_keys": sizes.split_keys,
            "max_splits": sizes.max_splits,
            "doublings": sizes.doublings,
        }
        self._same = {
            "scale": shape.scaling * _LOG2_E,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "dim_block": sizes.dim_block,
            "key_block": sizes.key_block,
            "block_size": cache.shape[4],
            "num_warps": sizes.warps,
            "num_stages": sizes.stages,
            "enable_fp_fusion": True,
        }

    def begin(self, plan: StepPlan) -> None:
        pass

    def attend(self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None) -> Tensor:
        out = self.decodes(qkv, plan, layer, window)
        if plan.num_decodes < len(plan.firsts):
            self._chunks(qkv, plan, layer, window or 0, out)
        return out

    def decodes(self, qkv: Tensor, plan: StepPlan, layer: int, window: int | None = None) -> Tensor:
        """As `attend`, but rows of chunks are not written yet."""
        out = qkv.new_empty(len(qkv), self._shape.num_heads * self._shape.head_dim)
        if plan.num_tokens < len(qkv):
            out[plan.num_tokens :].zero_()
        if plan.num_decodes:
            self._decode(qkv, plan, layer, window or 0, out)
        return out

    def _decode(self, qkv: Tensor, plan: StepPlan, layer: int, window: int, out: Tensor) -> None:
        shape, sizes, count = self._shape, self._sizes, plan.num_decodes
        num_splits = min(sizes.max_splits, -(-plan.longest // sizes.split_keys))
        parts = (count, shape.num_heads, num_splits)
        partial = torch.empty(*parts, shape.head_dim, dtype=torch.float32, device=qkv.device)
        weights = torch.empty(parts, dtype=torch.float32, device=qkv.device)
        attention.decode[(count, shape.num_kv_heads, num_splits)](
            qkv,
            self._cache,
            partial,
            weights,
            firsts=plan.firsts,
            contexts=plan.contexts,
            table_rows=plan.table_rows,
            tables=plan.tables,
            table_stride=plan.tables.stride(0),
            rows=sizes.decode_rows,
            window=window,
            **self._splits,
            **strides(self._cache, layer),
            **self._same,
        )
        attention.merge[(count, shape.num_heads)](
            partial,
            weights,
            out,
            firsts=plan.firsts,
            contexts=plan.contexts,
            num_splits=num_splits,
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            dim_block=sizes.dim_block,
            split_block=power_of_two(sizes.max_splits),
            **self._splits,
            window=window,
            enable_fp_fusion=True,
        )

    def _chunks(self, qkv: Tensor, plan: StepPlan, layer: int, window: int, out: Tensor) -> None:
        shape, first = self._shape, plan.num_decodes
        # The longest chunk is not known on the host; no chunk is longer than all of them.
        pairs = (plan.num_tokens - first) * (shape.num_heads // shape.num_kv_heads)
        grid = (len(plan.firsts) - first, -(-pairs // self._sizes.chunk_rows), shape.num_kv_heads)
        attention.chunk[grid](
            qkv,
            self._cache,
            out,
            firsts=plan.firsts[first:],
            lengths=plan.lengths[first:],
            contexts=plan.contexts[first:],
            table_rows=plan.table_rows[first:],
            tables=plan.tables,
            table_stride=plan.tables.stride(0),
            rows=self._sizes.chunk_rows,
            window=window,
            **strides(self._cache, layer),
            **self._same,
        )


def strides(cache: Tensor, layer: int) -> dict[str, int]:
    return {
        "layer_offset": layer * cache.stride(2),
        "head_stride": cache.stride(1),
        "block_stride": cache.stride(0),
    }
