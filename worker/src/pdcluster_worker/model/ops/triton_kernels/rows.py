"""Row kernels: residual and norm, gate, head norms and rotation, rounding as `ops.reference`."""

import triton
import triton.language as tl

from pdcluster_worker.model.ops.triton_kernels import stored


@triton.jit
def _normed(
    wide: tl.tensor,
    mean: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    dtype: tl.constexpr,
    rounds_first: tl.constexpr,
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
    epsilon: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    has_added: tl.constexpr,
    rounds_first: tl.constexpr,
) -> None:
    """One program per row: hidden += added, out = norm(hidden)."""
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
def gate_mul(
    gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, block: tl.constexpr, is_silu: tl.constexpr
) -> None:
    """One program per `block` columns of a row: activation(gate) * up."""
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
        # 0.5 * (1 + tanh(inner)) is sigmoid(2 * inner)
        active = gate / (1.0 + tl.exp(-2.0 * inner))
    product = active.to(dtype).to(tl.float32) * up
    tl.store(out + row * width + columns, product.to(dtype), mask=inside)


@triton.jit
def _load(
    start: tl.tensor, pairs: tl.tensor, rest: tl.tensor, half: tl.constexpr, head_dim: tl.constexpr
) -> tl.tuple:
    """The three parts of a head: left half, right half, tail that is not rotated."""
    return (
        tl.load(start + pairs, mask=pairs < half, other=0.0),
        tl.load(start + half + pairs, mask=pairs < half, other=0.0),
        tl.load(start + rest, mask=rest < head_dim, other=0.0),
    )


@triton.jit
def _store(
    start: tl.tensor,
    parts: tl.tuple,
    pairs: tl.tensor,
    rest: tl.tensor,
    half: tl.constexpr,
    head_dim: tl.constexpr,
) -> None:
    tl.store(start + pairs, parts[0], mask=pairs < half)
    tl.store(start + half + pairs, parts[1], mask=pairs < half)
    tl.store(start + rest, parts[2], mask=rest < head_dim)


@triton.jit
def _norm_head(
    parts: tl.tuple,
    by: tl.tuple,
    epsilon: tl.tensor,
    head_dim: tl.constexpr,
    rounds_first: tl.constexpr,
) -> tl.tuple:
    """by: weights of the three parts."""
    dtype: tl.constexpr = parts[0].dtype
    left, right = parts[0].to(tl.float32), parts[1].to(tl.float32)
    tail = parts[2].to(tl.float32)
    total = tl.sum(left * left + right * right, axis=0)
    mean = (total + tl.sum(tail * tail, axis=0)) / head_dim
    return (
        _normed(left, mean, by[0], epsilon=epsilon, dtype=dtype, rounds_first=rounds_first),
        _normed(right, mean, by[1], epsilon=epsilon, dtype=dtype, rounds_first=rounds_first),
        _normed(tail, mean, by[2], epsilon=epsilon, dtype=dtype, rounds_first=rounds_first),
    )


@triton.jit
def _rotate(left: tl.tensor, right: tl.tensor, cosine: tl.tensor, sine: tl.tensor) -> tl.tuple:
    """Each product is rounded, then their sum."""
    dtype: tl.constexpr = left.dtype
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    kept, turned = (wide_left * cosine).to(dtype), (wide_right * sine).to(dtype)
    new_left = (kept.to(tl.float32) - turned.to(tl.float32)).to(dtype)
    kept, turned = (wide_right * cosine).to(dtype), (wide_left * sine).to(dtype)
    return new_left, (kept.to(tl.float32) + turned.to(tl.float32)).to(dtype)


@triton.jit
def _sizes(x: tl.tensor) -> tl.tensor:
    """Bits of |x|, which are in the order of the sizes, inf and NaN above all."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _code(x: tl.tensor, factor: tl.tensor, is_fp8: tl.constexpr) -> tl.tensor:
    """x * factor as bits of a byte, rounded to the nearest, ties to even; see `stored_kv.quantize`.

    factor: 0 = the byte is 0.
    """
    top: tl.constexpr = 448.0 if is_fp8 else 127.0
    whole: tl.constexpr = 12582912.0  # a sum with it is rounded to a whole number
    scaled = tl.where(factor > 0.0, x.to(tl.float32), 0.0) * factor
    scaled = tl.minimum(tl.maximum(scaled, -top), top)
    if not is_fp8:
        return ((scaled + whole) - whole).to(tl.int32)
    size = _sizes(scaled)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(scaled) * 512.0 + whole).to(tl.int32, bitcast=True) - 0x4B400000
    negative = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(tl.abs(scaled) < 0.015625, small, normal) | negative


@triton.jit
def _quantized(parts: tl.tuple, is_fp8: tl.constexpr) -> tl.tuple:
    """The parts of a head as bytes, and their scale."""
    top: tl.constexpr = 448.0 if is_fp8 else 127.0
    most = tl.maximum(tl.max(_sizes(parts[0]), axis=0), tl.max(_sizes(parts[1]), axis=0))
    greatest = tl.maximum(most, tl.max(_sizes(parts[2]), axis=0))
    is_finite = greatest < 0x7F800000
    is_large = is_finite & (greatest >= 0x04000000)  # 2**-119
    size = tl.minimum(tl.where(is_large, greatest, 0x3F800000).to(tl.float32, bitcast=True), 3e38)
    factor = tl.where(is_large, tl.div_rn(top, size), 0.0)
    scale = tl.where(is_large, size * (1.0 / top), 0.0)
    codes = (
        _code(parts[0], factor, is_fp8),
        _code(parts[1], factor, is_fp8),
        _code(parts[2], factor, is_fp8),
    )
    return codes, tl.where(is_finite, scale, float("nan"))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_store(
    qkv: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
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
    """One program per row and head: norm and rotate in place, store keys and values in a slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs, rest = tl.arange(0, half_block), 2 * half + tl.arange(0, tail_block)
    in_pairs = pairs < half
    start = qkv + (row * (num_heads + 2 * num_kv_heads) + head) * head_dim
    left, right, tail = _load(start, pairs, rest, half=half, head_dim=head_dim)
    is_value = head >= num_heads + num_kv_heads
    if not is_value:
        if has_norms:
            weight, epsilon = query_weight, query_epsilon
            if head >= num_heads:
                weight, epsilon = key_weight, key_epsilon
            by = _load(weight, pairs, rest, half=half, head_dim=head_dim)
            left, right, tail = _norm_head((left, right, tail), by, epsilon, head_dim, rounds_first)
        if rotates:
            cos = tl.load(cosine + row * half + pairs, mask=in_pairs, other=0.0)
            sin = tl.load(sine + row * half + pairs, mask=in_pairs, other=0.0)
            left, right = _rotate(left, right, cos, sin)
        _store(start, (left, right, tail), pairs, rest, half=half, head_dim=head_dim)
    slot = tl.load(slots + row)
    if head >= num_heads and slot >= 0:
        kv_head = (head - num_heads) % num_kv_heads
        place = (slot // block_size) * block_stride + kv_head * head_stride + layer_offset
        place += is_value.to(tl.int64) * stored.half_size(cache, block_size, head_dim)
        if cache.dtype.element_ty.primitive_bitwidth == 8:
            parts, scale = _quantized((left, right, tail), cache.dtype.element_ty == tl.uint8)
            scales = (cache + place).to(tl.pointer_type(tl.float32))
            tl.store(
                scales + stored.scales_at(block_size, head_dim) // 4 + slot % block_size, scale
            )
        else:
            parts = (left, right, tail)
        place += (slot % block_size) * head_dim
        _store(cache + place, parts, pairs, rest, half=half, head_dim=head_dim)
