"""Attention over the paged KV cache: split-K decodes, and prefill chunks with their context.

Splits depend only on a sequence's own context.  `window`: keys that a row sees; 0 = all before it.
`cache`: of bytes where keys and values are quantized, int8 or (uint8) e4m3, with scales.
"""

import triton
import triton.language as tl

from pdcluster_worker.model.ops.triton_kernels import stored

# arrays of a step lie anywhere in one buffer; without this each alignment would compile a kernel
# while serving
PLAN = ["firsts", "contexts", "table_rows", "tables"]


@triton.jit
def _load_heads(
    source: tl.tensor,
    places: tl.tensor,
    exists: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
) -> tl.tensor:
    """Heads [rows, dim_block]; 0 where one does not exist.  places: in heads."""
    dims = tl.arange(0, dim_block)
    mask = exists[:, None] & (dims < head_dim)[None, :]
    return tl.load(source + places[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _store_heads(
    target: tl.tensor,
    places: tl.tensor,
    heads: tl.tensor,
    exists: tl.tensor,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
) -> None:
    """Store heads [rows, dim_block] in the target's dtype.  places: in heads."""
    dims = tl.arange(0, dim_block)
    mask = exists[:, None] & (dims < head_dim)[None, :]
    pointers = target + places[:, None] * head_dim + dims[None, :]
    tl.store(pointers, heads.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _spread_non_finite(value: tl.tensor, sums: tl.tensor, seen: tl.tensor) -> tl.tensor:
    """Replace non-finite values by 0, and sums that see one by NaN: 0 * inf would be NaN.

    value: [keys, dim_block].  sums: [rows, dim_block].  seen: [rows, keys].
    """
    wide = value.to(tl.float32)
    finite = tl.abs(wide) < float("inf")  # false for NaN
    flaws = tl.where(finite, 0.0, 1.0).to(value.dtype)
    bad = tl.dot(seen.to(value.dtype), flaws, input_precision="ieee")
    sums = tl.where(bad > 0.0, float("nan"), sums)
    return tl.where(finite, wide, 0.0).to(value.dtype), sums


@triton.jit
def _tile(
    query: tl.tensor,
    limits: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    start: tl.tensor,
    last: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    window: tl.constexpr,
    head_dim: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
    is_whole: tl.constexpr,
    is_one_row: tl.constexpr,
) -> tl.tuple:
    """Add keys [start, start + key_block) to the running softmax: best, total and sums.

    is_whole:   every row sees all of them, no mask.
    is_one_row: all rows see the same keys.
    """
    dims = tl.arange(0, query.shape[1])
    places = start + tl.arange(0, key_block)
    exists, offset = places < last, places % block_size
    mask = (dims < head_dim)[None, :] & exists[:, None]
    if is_whole:
        block = tl.load(table + places // block_size)
    else:
        block = tl.load(table + places // block_size, mask=exists, other=0)
    block = block.to(tl.int64) * block_stride
    half = stored.half_size(keys, block_size, head_dim)
    is_quantized: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    is_masked: tl.constexpr = not is_whole or head_dim != query.shape[1]
    pointers = keys + (block + offset * head_dim)[:, None] + dims[None, :]
    key, value = stored.load(pointers, mask, half, is_masked, query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if is_quantized:
        scores *= stored.scales(keys, block, offset, exists, block_size, head_dim)[None, :]
    if not is_whole:
        seen = exists[None, :] & (places[None, :] <= limits[:, None])
        if window > 0:
            seen = seen & (places[None, :] > limits[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        if not is_one_row and not is_quantized:  # quantized values are finite
            value, sums = _spread_non_finite(value, sums, seen)
    now_best = tl.maximum(best, tl.max(scores, axis=1))
    # A row whose window has not begun has no best score.
    base = now_best if is_whole else tl.where(now_best == float("-inf"), 0.0, now_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, axis=1)
    sums *= shrink[:, None]
    if is_quantized:  # a weight of 0 takes nothing, also where the scale is NaN
        by = stored.scales(keys + half, block, offset, exists, block_size, head_dim)
        weights = tl.where(weights == 0.0, 0.0, weights * by[None, :])
    sums = tl.dot(weights.to(value.dtype), value, sums, input_precision="ieee")
    return now_best, total, sums


@triton.jit
def _attend(
    query: tl.tensor,
    limits: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    seen_to: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    window: tl.constexpr,
    head_dim: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
    is_one_row: tl.constexpr,
) -> tl.tensor:
    """Softmax attention over keys [first, last), in base 2.

    query:  [rows, dim_block].  limits: [rows], the last key that each row sees.
    keys:   of block 0 of the layer and head; values follow.
    seen_to: every row sees keys [first, seen_to).
    Returns sums [rows, dim_block] and log2 of the total weights [rows], float32.
    """
    best = tl.full((query.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    sums = tl.zeros(query.shape, tl.float32)
    edge = first + tl.maximum(seen_to - first, 0) // key_block * key_block
    for part in tl.static_range(2):  # tiles that all rows see whole, then those at the edge
        for start in range(edge if part else first, last if part else edge, key_block):
            best, total, sums = _tile(
                query,
                limits,
                table,
                keys,
                start=start,
                last=last,
                best=best,
                total=total,
                sums=sums,
                scale=scale,
                block_stride=block_stride,
                window=window,
                head_dim=head_dim,
                key_block=key_block,
                block_size=block_size,
                is_whole=part == 0,
                is_one_row=is_one_row,
            )
    return sums / total[:, None], best + tl.log2(total)


@triton.jit
def _split_size(
    context: tl.tensor,
    split_keys: tl.constexpr,
    max_splits: tl.constexpr,
    doublings: tl.constexpr,
) -> tl.tensor:
    """`split_keys`, doubled until a context has at most `max_splits` splits."""
    size = tl.full((), split_keys, tl.int32)
    for _ in tl.static_range(doublings):
        size = tl.where(size * max_splits < context, size * 2, size)
    return size


@triton.jit(do_not_specialize_on_alignment=PLAN)
def decode(
    qkv: tl.tensor,
    cache: tl.tensor,
    partial: tl.tensor,
    weights: tl.tensor,
    firsts: tl.tensor,
    contexts: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    scale: tl.tensor,
    layer_offset: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    rows: tl.constexpr,
    dim_block: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
    split_keys: tl.constexpr,
    max_splits: tl.constexpr,
    doublings: tl.constexpr,
) -> None:
    """One program per sequence, KV head and split; `merge` combines the splits.

    partial: [sequences, num_heads, splits, head_dim] float32; weights: without head_dim.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + sequence)
    size = _split_size(context, split_keys, max_splits, doublings)
    first = tl.maximum(split * size, context - window) if window > 0 else split * size
    last = tl.minimum(context, (split + 1) * size)
    if first >= last:
        return
    group: tl.constexpr = num_heads // num_kv_heads
    heads = tl.arange(0, rows)
    head, exists = kv_head * group + heads, heads < group
    places = tl.load(firsts + sequence).to(tl.int64) * (num_heads + 2 * num_kv_heads) + head
    sums, logs = _attend(
        _load_heads(qkv, places, exists, head_dim, dim_block),
        tl.full((rows,), 0, tl.int32) + context - 1,
        tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride,
        cache + kv_head * head_stride + layer_offset,
        first=first,
        last=last,
        seen_to=last,
        scale=scale,
        block_stride=block_stride,
        window=window,
        head_dim=head_dim,
        key_block=key_block,
        block_size=block_size,
        is_one_row=True,
    )
    parts = (sequence * num_heads + head).to(tl.int64) * tl.num_programs(2) + split
    _store_heads(partial, parts, sums, exists, head_dim, dim_block)
    tl.store(weights + parts, logs, mask=exists)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=PLAN[:2])
def merge(
    partial: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    firsts: tl.tensor,
    contexts: tl.tensor,
    num_splits: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    split_block: tl.constexpr,
    split_keys: tl.constexpr,
    max_splits: tl.constexpr,
    doublings: tl.constexpr,
    window: tl.constexpr,
) -> None:
    """One program per sequence and head; a context of 0 gives 0."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(contexts + sequence)
    size = _split_size(context, split_keys, max_splits, doublings)
    used = tl.cdiv(context, size)
    unused = tl.maximum(context - window, 0) // size if window > 0 else 0
    splits, dims = tl.arange(0, split_block), tl.arange(0, dim_block)
    exists, in_head = (splits < used) & (splits >= unused), dims < head_dim
    part = (sequence * num_heads + head).to(tl.int64) * num_splits + splits
    logs = tl.load(weights + part, mask=exists, other=float("-inf"))
    best = tl.maximum(tl.max(logs, axis=0), -1e30)  # not -inf - -inf where there is no split
    shares = tl.exp2(logs - best)
    mask = exists[:, None] & in_head[None, :]
    sums = tl.load(partial + part[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(shares, axis=0)
    result = tl.sum(sums * shares[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    row = tl.load(firsts + sequence).to(tl.int64) * num_heads + head
    tl.store(out + row * head_dim + dims, result.to(out.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize_on_alignment=[*PLAN, "lengths"])
def chunk(
    qkv: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    table_rows: tl.tensor,
    firsts: tl.tensor,
    lengths: tl.tensor,
    contexts: tl.tensor,
    scale: tl.tensor,
    layer_offset: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    rows: tl.constexpr,
    dim_block: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    """One program per sequence, `rows` (row, head) pairs and KV head: causal, all context."""
    sequence, tile, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = num_heads // num_kv_heads
    length, context = tl.load(lengths + sequence), tl.load(contexts + sequence)
    if tile * rows >= length * group:
        return
    pairs = tile * rows + tl.arange(0, rows)
    token = pairs // group
    exists = token < length
    row = tl.load(firsts + sequence).to(tl.int64) + token
    head = kv_head * group + pairs % group
    places = row * (num_heads + 2 * num_kv_heads) + head
    query = _load_heads(qkv, places, exists, head_dim, dim_block)
    before = context - length
    first_limit = before + tile * rows // group
    last_limit = before + tl.minimum((tile * rows + rows - 1) // group, length - 1)
    sums, _ = _attend(
        query,
        tl.minimum(before + token, last_limit),
        tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride,
        cache + kv_head * head_stride + layer_offset,
        first=tl.maximum(first_limit + 1 - window, 0) if window > 0 else 0,
        last=last_limit + 1,
        seen_to=0 if window > 0 else first_limit + 1,
        scale=scale,
        block_stride=block_stride,
        window=window,
        head_dim=head_dim,
        key_block=key_block,
        block_size=block_size,
        is_one_row=False,
    )
    _store_heads(out, row * num_heads + head, sums, exists, head_dim, dim_block)
