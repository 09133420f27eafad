"""Rows of keys and values as a cache holds them (`ops.stored_kv`): as computed, or bytes, int8 or
(uint8) e4m3, with their float32 scales behind the rows of each block.
"""

import triton
import triton.language as tl


@triton.jit
def scales_at(block_size: tl.constexpr, head_dim: tl.constexpr) -> tl.constexpr:
    """Bytes of quantized keys, or values, of a block, after which their float32 scales lie."""
    return (block_size * head_dim + 3) // 4 * 4


@triton.jit
def half_size(cache: tl.tensor, block_size: tl.constexpr, head_dim: tl.constexpr) -> tl.constexpr:
    """Elements from the keys of a block to its values."""
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        return scales_at(block_size, head_dim) + 4 * block_size
    return block_size * head_dim


@triton.jit
def load(
    pointers: tl.tensor,
    mask: tl.tensor,
    half: tl.constexpr,
    is_masked: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tuple:
    """Keys and values in the dtype, 0 where masked, without their scales."""
    if is_masked:
        key = tl.load(pointers, mask=mask, other=0)
        value = tl.load(pointers + half, mask=mask, other=0)
    else:
        key, value = tl.load(pointers), tl.load(pointers + half)
    return _expanded(key, dtype), _expanded(value, dtype)


@triton.jit
def _expanded(rows: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Stored rows in the dtype of queries, without their scales: exact."""
    if rows.dtype == tl.uint8:
        return rows.to(tl.float8e4nv, bitcast=True).to(dtype)
    if rows.dtype == tl.int8:  # the interpreter has no integers to bfloat16
        return rows.to(tl.float32).to(dtype)
    return rows.to(dtype)


@triton.jit
def scales(
    half: tl.tensor,
    blocks: tl.tensor,
    offsets: tl.tensor,
    exists: tl.tensor,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
) -> tl.tensor:
    """Scales of keys, or of values: of block 0 at `half`, of others `blocks` bytes on."""
    first = half.to(tl.pointer_type(tl.float32)) + scales_at(block_size, head_dim) // 4
    return tl.load(first + blocks // 4 + offsets, mask=exists, other=0.0)
