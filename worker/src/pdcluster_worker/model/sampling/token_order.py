"""The order of tokens: greater logit first, ties, frequent in bfloat16, by lower token id."""

import torch
from torch import Tensor

_LOW_BITS = (1 << 32) - 1
_TIE_CAPACITY = 2  # look at more tokens than needed, in case of ties at the end


def first_tokens(logits: Tensor, count: int) -> Tensor:
    """logits: [R, V] float32, not NaN; returns ids [R, min(count, V)] int64, in order."""
    vocab_size = logits.shape[1]
    count = min(count, vocab_size)
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(min(count * _TIE_CAPACITY, vocab_size))
    first = _first(order_keys(values, ids), count)
    # Where even the last one looked at is an equal of the last wanted, there may be more of them.
    is_open = (values[:, count - 1] == values[:, -1]).nonzero()[:, 0]
    if len(is_open) and values.shape[1] < vocab_size:
        all_ids = torch.arange(vocab_size, device=logits.device)
        first[is_open] = _first(order_keys(logits[is_open], all_ids), count)
    return first


def order_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, greater for earlier tokens.  logits: [R, N], not NaN; ids: [R, N] or [N]."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: a negative zero equals a positive one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats in the order of integers
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - ids)


def _first(keys: Tensor, count: int) -> Tensor:
    return _LOW_BITS - (keys.topk(count).values & _LOW_BITS)
