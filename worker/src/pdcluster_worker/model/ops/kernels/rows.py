"""Kernels over the rows of a step: residual and norm, gate, and what is done to a row's heads before attention.

Each rounds where `ops.reference` rounds.  A program reads and writes its own
row, so a row's result does not depend on the batch.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(
    wide: tl.tensor, mean: tl.tensor, weight: tl.tensor, *, epsilon: tl.tensor, dtype: tl.constexpr, rounds_first: tl.constexpr
) -> tl.tensor:
    """wide / sqrt(mean + epsilon) * weight, rounded to dtype."""
    normed = wide * tl.rsqrt(mean + epsilon)
    if rounds_first:
        product = normed.to(dtype).to(tl.float32) * weight.to(dtype).to(tl.float32)
    else:
        product = normed * weight
    return product.to(dtype)


@triton.jit
def add_rms_norm(
    added: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    *,
    epsilon: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    has_added: tl.constexpr,
    rounds_first: tl.constexpr,
) -> None:
    """One program a row: hidden += added, out = norm(hidden)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    dtype: tl.constexpr = hidden.dtype.element_ty
    value = tl.load(hidden + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if has_added:
        more = tl.load(added + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + more).to(dtype)
        tl.store(hidden + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    mean = tl.sum(value * value, axis=0) / width
    normed = _normed(value, mean, scale, epsilon=epsilon, dtype=dtype, rounds_first=rounds_first)
    tl.store(out + row * width + columns, normed, mask=inside)


@triton.jit
def gate_mul(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, *, block: tl.constexpr, is_silu: tl.constexpr) -> None:
    """One program for `block` columns of a row: activation(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    dtype: tl.constexpr = gate_up.dtype.element_ty
    first = gate_up + row * width * 2 + columns
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=inside, other=0.0).to(tl.float32)
    if is_silu:
        active = gate / (1.0 + tl.exp(-gate))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(inner)) is sigmoid(2 * inner)
    product = active.to(dtype).to(tl.float32) * up
    tl.store(out + row * width + columns, product.to(dtype), mask=inside)


@triton.jit
def rope_store(
    qkv: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    *,
    cosine: tl.tensor,
    sine: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    query_epsilon: tl.tensor,
    key_epsilon: tl.tensor,
    layer_offset: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    tail_block: tl.constexpr,
    block_size: tl.constexpr,
    rotates: tl.constexpr,
    has_norms: tl.constexpr,
    rounds_first: tl.constexpr,
) -> None:
    """One program a row and head: norm and rotate it in place; keys and values also go to the row's slot.

    A head is read as three parts, which the same threads write back: the first
    `half` numbers, their partners, and the tail that is not rotated.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype: tl.constexpr = qkv.dtype.element_ty
    pairs, rest = tl.arange(0, half_block), 2 * half + tl.arange(0, tail_block)
    in_pairs, in_rest = pairs < half, rest < head_dim
    start = qkv + (row * (num_heads + 2 * num_kv_heads) + head) * head_dim
    left = tl.load(start + pairs, mask=in_pairs, other=0.0)
    right = tl.load(start + half + pairs, mask=in_pairs, other=0.0)
    tail = tl.load(start + rest, mask=in_rest, other=0.0)
    is_value = head >= num_heads + num_kv_heads
    if not is_value:
        if has_norms:
            is_key = head >= num_heads
            weight, epsilon = query_weight, query_epsilon
            if is_key:
                weight, epsilon = key_weight, key_epsilon
            wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
            wide_tail = tail.to(tl.float32)
            total = tl.sum(wide_left * wide_left + wide_right * wide_right, axis=0)
            mean = (total + tl.sum(wide_tail * wide_tail, axis=0)) / head_dim
            by = tl.load(weight + pairs, mask=in_pairs, other=0.0)
            left = _normed(wide_left, mean, by, epsilon=epsilon, dtype=dtype, rounds_first=rounds_first)
            by = tl.load(weight + half + pairs, mask=in_pairs, other=0.0)
            right = _normed(wide_right, mean, by, epsilon=epsilon, dtype=dtype, rounds_first=rounds_first)
            by = tl.load(weight + rest, mask=in_rest, other=0.0)
            tail = _normed(wide_tail, mean, by, epsilon=epsilon, dtype=dtype, rounds_first=rounds_first)
            tl.store(start + rest, tail, mask=in_rest)
        if rotates:
            cos = tl.load(cosine + row * half + pairs, mask=in_pairs, other=0.0)
            sin = tl.load(sine + row * half + pairs, mask=in_pairs, other=0.0)
            old_left, old_right = left.to(tl.float32), right.to(tl.float32)
            kept, turned = (old_left * cos).to(dtype), (old_right * sin).to(dtype)
            left = (kept.to(tl.float32) - turned.to(tl.float32)).to(dtype)
            kept, turned = (old_right * cos).to(dtype), (old_left * sin).to(dtype)
            right = (kept.to(tl.float32) + turned.to(tl.float32)).to(dtype)
        tl.store(start + pairs, left, mask=in_pairs)
        tl.store(start + half + pairs, right, mask=in_pairs)
    slot = tl.load(slots + row)
    if head >= num_heads and slot >= 0:
        kv_head = (head - num_heads) % num_kv_heads
        place = (slot // block_size) * block_stride + kv_head * head_stride + layer_offset
        place += is_value.to(tl.int64) * (block_size * head_dim)
        target = cache + place + (slot % block_size) * head_dim
        tl.store(target + pairs, left, mask=in_pairs)
        tl.store(target + half + pairs, right, mask=in_pairs)
        tl.store(target + rest, tail, mask=in_rest)
