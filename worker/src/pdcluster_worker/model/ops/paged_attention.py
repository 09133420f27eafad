"""Attention on a GPU: Triton kernels (split-K decodes with a merge, tiled prefill chunks), and
torch for whole long prompts.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.ops.triton_kernels import attention
from pdcluster_worker.model.step_plan import StepLimits, StepPlan

MAX_SPLITS = 32  # of one sequence

_MIN_SPLIT_KEYS = 256
_MIN_ROWS = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    decode_rows: int  # query heads of one KV head, padded
    chunk_rows: int  # (row, head) pairs of one program
    dim_block: int  # head_dim, padded
    key_block: int  # keys of one product
    split_keys: int  # keys of one split of a short context
    doublings: int  # of split_keys for the longest context
    max_splits: int
    warps: int
    stages: int = 2  # loads of keys in flight

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, longest: int) -> "AttentionSizes":
        """longest: tokens of the longest context."""
        dim_block = max(_MIN_ROWS, power_of_two(shape.head_dim))
        row_bytes = dim_block * dtype.itemsize
        longest_split = max(_MIN_SPLIT_KEYS, power_of_two(-(-longest // MAX_SPLITS)))
        return cls(
            decode_rows=max(_MIN_ROWS, power_of_two(shape.num_heads // shape.num_kv_heads)),
            chunk_rows=64 if dtype == torch.bfloat16 else 32,  # float32 has no tensor cores here
            dim_block=dim_block,
            # Keys and values of the stages in flight must fit into shared memory.
            key_block=64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16,
            split_keys=_MIN_SPLIT_KEYS,
            doublings=(longest_split // _MIN_SPLIT_KEYS).bit_length() - 1,
            max_splits=min(MAX_SPLITS, -(-longest // _MIN_SPLIT_KEYS)),
            # Without tensor cores a tile of float32 spills from the registers of four.
            warps=4 if dtype == torch.bfloat16 else 8,
        )


def power_of_two(number: int) -> int:
    """Smallest power of two >= number >= 1."""
    return 1 << (number - 1).bit_length()


_LOG2_E = math.log2(math.e)  # the kernels' exponentials are of base 2


class TritonAttention:
    name = "triton"

    def __init__(
        self, cache: Tensor | StoredKV, shape: AttentionShape, sizes: AttentionSizes
    ) -> None:
        cache = StoredKV.of(cache)
        if not cache.is_whole:
            raise ValueError("the KV cache must be contiguous")
        self._cache = cache
        self._memory = memory_of(cache)
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
            "block_size": cache.block_size,
            "num_warps": sizes.warps,
            "num_stages": sizes.stages,
            "enable_fp_fusion": True,
        }

    def begin(self, plan: StepPlan) -> None:
        """Prepare for an eager step.  plan: on the host."""

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
            self._memory,
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
            self._memory,
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


def strides(cache: StoredKV, layer: int) -> dict[str, int]:
    rows = cache.rows
    return {
        "layer_offset": layer * rows.stride(2),
        "head_stride": rows.stride(1),
        "block_stride": rows.stride(0),
    }


def memory_of(cache: StoredKV) -> Tensor:
    """Rows as the kernels take them, e4m3 as uint8; quantized rows' scales are behind them."""
    return cache.rows.view(torch.uint8) if cache.rows.dtype == torch.float8_e4m3fn else cache.rows


MIN_ROWS = 1024  # shortest prompt that pays for the launches


class TorchAttention(TritonAttention):
    name = "torch and triton"

    def __init__(
        self, cache: Tensor | StoredKV, shape: AttentionShape, sizes: AttentionSizes
    ) -> None:
        super().__init__(cache, shape, sizes)
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
            return super().attend(qkv, plan, layer, window)
        if self._other_lengths is None:
            out = self.decodes(qkv, plan, layer)
        else:
            out = super().attend(qkv, replace(plan, lengths=self._other_lengths), layer)
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


def make_attention(
    cache: Tensor | StoredKV, shape: AttentionShape, limits: StepLimits
) -> TritonAttention:
    """torch attends to keys as they are computed, which must be those that are stored."""
    cache = StoredKV.of(cache)
    is_own = cache.rows.dtype == cache.dtype
    by_torch = cache.device.type == "cuda" and cache.dtype != torch.float32 and is_own
    sizes = AttentionSizes.of(shape, cache.dtype, limits.longest)
    return (TorchAttention if by_torch else TritonAttention)(cache, shape, sizes)
