"""The one order of tokens: the greater logit first, of equal logits the lower token id.

top_k, top_p, greedy choice and listed log probabilities all cut in this order;
bfloat16 logits are equal too often to leave ties to a sort.
"""

import torch
from torch import Tensor

_LOW_BITS = (1 << 32) - 1


def order_keys(logits: Tensor) -> Tensor:
    """[R, V] int64, all different in a row, greater for a token that comes earlier; logits are float32 and not NaN."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: a negative zero equals a positive one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats in the order of integers
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - ids)


def first_tokens(logits: Tensor, count: int) -> Tensor:
    """Token ids of the first `count` tokens of each row, in order.  logits: [R, V]; returns [R, min(count, V)] int64."""
    keys = order_keys(logits)
    return _LOW_BITS - (keys.topk(min(count, keys.shape[1])).values & _LOW_BITS)
