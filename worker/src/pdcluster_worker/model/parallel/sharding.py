"""A rank's share of a layer's products (Megatron-style).

Outputs of q, k, v, gate and up, inputs of o and down, and the head's vocabulary are split.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.parallel.rank_layout import ParallelRank


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """weight: [N, K]; bias: [N] or None."""

    weight: Tensor
    bias: Tensor | None


def split_outputs(linear: Any, place: ParallelRank) -> SplitProduct:
    """The rank's rows of the weights, and their biases."""
    share = place.share(len(linear.weight))
    return SplitProduct(
        linear.weight.detach()[share], None if linear.bias is None else linear.bias.detach()[share]
    )


def split_inputs(linear: Any, place: ParallelRank) -> SplitProduct:
    """The rank's columns of the weights; only the first rank adds the bias."""
    share = place.share(linear.weight.shape[1])
    bias = None if linear.bias is None or place.part else linear.bias.detach()
    return SplitProduct(linear.weight.detach()[:, share], bias)


def split_vocabulary(linear: Any, place: ParallelRank) -> SplitProduct:
    """The rank's rows of the head, equally many for all: missing rows are 0."""
    vocab_size = len(linear.weight)
    size = -(-vocab_size // place.tensor_size)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if missing := size * place.tensor_size - vocab_size:
        weight = functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else functional.pad(bias, (0, missing))
    rows = slice(place.part * size, (place.part + 1) * size)
    return SplitProduct(weight[rows], None if bias is None else bias[rows])
