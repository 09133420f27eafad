"""Attention over the paged KV cache: decodes split over keys, prefill chunks with their context.

The query heads that share a KV head are rows of one product, so a key is read
once for all of them.  A sequence's keys are cut at multiples of `split_keys`,
whatever else is in the batch; partial results are put together by `merge`.
Slots beyond a sequence's context are not read.
"""

import triton
import triton.language as tl


@triton.jit
def _attend(
    query: tl.tensor,
    limits: tl.tensor,
    table: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
) -> tl.tensor:
    """Softmax attention over keys [first, last), in base 2.

    query:  [rows, dim_block].  limits: [rows], the last key that each row sees.
    keys:   the layer's and head's keys of block 0; values follow block_size * head_dim later.
    Returns normed sums [rows, dim_block] and log2 of the weights' sums [rows], both float32.
    """
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, dim_block), tl.float32)
    for start in range(first, last, key_block):
        places = start + tl.arange(0, key_block)
        exists = places < last
        block = tl.load(table + places // block_size, mask=exists, other=0).to(tl.int64)
        offsets = block * block_stride + (places % block_size) * head_dim
        pointers = keys + offsets[:, None] + dims[None, :]
        mask = exists[:, None] & in_head[None, :]
        key = tl.load(pointers, mask=mask, other=0.0)
        value = tl.load(pointers + block_size * head_dim, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = exists[None, :] & (places[None, :] <= limits[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - now_best[:, None])
        shrink = tl.exp2(best - now_best)
        total = total * shrink + tl.sum(weights, axis=1)
        sums *= shrink[:, None]
        sums = tl.dot(weights.to(value.dtype), value, sums, input_precision="ieee")
        best = now_best
    return sums / total[:, None], best + tl.log2(total)


@triton.jit
def decode(
    qkv: tl.tensor,
    cache: tl.tensor,
    partial: tl.tensor,
    weights: tl.tensor,
    firsts: tl.tensor,
    contexts: tl.tensor,
    seats: tl.tensor,
    tables: tl.tensor,
    scale: tl.tensor,
    layer_offset: tl.tensor,
    head_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    dim_block: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
    split_keys: tl.constexpr,
) -> None:
    """One program a sequence of one row, KV head and split.

    partial: [sequences, num_heads, splits, head_dim] float32; weights: [.., splits], for `merge`.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + sequence)
    if split * split_keys >= context:
        return
    group: tl.constexpr = num_heads // num_kv_heads
    heads, dims = tl.arange(0, rows), tl.arange(0, dim_block)
    mask = (heads < group)[:, None] & (dims < head_dim)[None, :]
    row = tl.load(firsts + sequence).to(tl.int64) * (num_heads + 2 * num_kv_heads)
    places = (row + kv_head * group + heads) * head_dim
    query = tl.load(qkv + places[:, None] + dims[None, :], mask=mask, other=0.0)
    table = tables + tl.load(seats + sequence).to(tl.int64) * table_stride
    limits = tl.zeros((rows,), tl.int32) + context
    sums, logs = _attend(
        query,
        limits,
        table,
        cache + kv_head * head_stride + layer_offset,
        first=split * split_keys,
        last=tl.minimum(context, (split + 1) * split_keys),
        scale=scale,
        block_stride=block_stride,
        rows=rows,
        head_dim=head_dim,
        dim_block=dim_block,
        key_block=key_block,
        block_size=block_size,
    )
    head = (sequence * num_heads + kv_head * group + heads).to(tl.int64)
    part = head * tl.num_programs(2) + split
    tl.store(partial + part[:, None] * head_dim + dims[None, :], sums, mask=mask)
    tl.store(weights + part, logs, mask=heads < group)


@triton.jit
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
) -> None:
    """One program a sequence and head: weigh the splits by their sums; a context of 0 gives 0."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    used = tl.cdiv(tl.load(contexts + sequence), split_keys)
    splits, dims = tl.arange(0, split_block), tl.arange(0, dim_block)
    exists, in_head = splits < used, dims < head_dim
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


@triton.jit
def chunk(
    qkv: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    seats: tl.tensor,
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
    rows: tl.constexpr,
    dim_block: tl.constexpr,
    key_block: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    """One program a sequence, `rows` of its (row, head of the group) pairs and KV head: causal, over all of its context."""
    sequence, tile, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = num_heads // num_kv_heads
    length, context = tl.load(lengths + sequence), tl.load(contexts + sequence)
    if tile * rows >= length * group:
        return
    pairs, dims = tile * rows + tl.arange(0, rows), tl.arange(0, dim_block)
    token = pairs // group
    mask = (token < length)[:, None] & (dims < head_dim)[None, :]
    row = tl.load(firsts + sequence).to(tl.int64) + token
    head = kv_head * group + pairs % group
    places = (row * (num_heads + 2 * num_kv_heads) + head) * head_dim
    query = tl.load(qkv + places[:, None] + dims[None, :], mask=mask, other=0.0)
    last_token = tl.minimum((tile * rows + rows - 1) // group, length - 1)
    sums, _ = _attend(
        query,
        context - length + token,
        tables + tl.load(seats + sequence).to(tl.int64) * table_stride,
        cache + kv_head * head_stride + layer_offset,
        first=0,
        last=context - length + last_token + 1,
        scale=scale,
        block_stride=block_stride,
        rows=rows,
        head_dim=head_dim,
        dim_block=dim_block,
        key_block=key_block,
        block_size=block_size,
    )
    places = (row * num_heads + head) * head_dim
    result = sums.to(out.dtype.element_ty)
    tl.store(out + places[:, None] + dims[None, :], result, mask=mask)
