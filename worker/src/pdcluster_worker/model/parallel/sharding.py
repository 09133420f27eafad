"""A rank's share of a layer's products.

Outputs of q, k, v, gate and up are divided, so that each rank has whole heads and
the same features of gate and up; inputs of o and down are divided likewise, and
their results are summed over the ranks (`Operations.reduce`).  The head is divided
by vocabulary, and its logits are put side by side (`Operations.gather`).  Pure
slices: put together in the order of the ranks they are the whole again.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from pdcluster_worker.model.parallel.rank_layout import ParallelRank


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """Weights [N, K] of one product and its bias [N] or None."""

    weight: Tensor
    bias: Tensor | None


def split_outputs(linear: Any, place: ParallelRank) -> SplitProduct:
    """The rank's rows of a torch Linear's weights, and their biases."""
    share = place.share(len(linear.weight))
    return SplitProduct(
        linear.weight.detach()[share], None if linear.bias is None else linear.bias.detach()[share]
    )


def split_inputs(linear: Any, place: ParallelRank) -> SplitProduct:
    """The rank's columns of a torch Linear's weights.

    The results are summed, so the first rank alone adds the bias.
    """
    share = place.share(linear.weight.shape[1])
    bias = None if linear.bias is None or place.part else linear.bias.detach()
    return SplitProduct(linear.weight.detach()[:, share], bias)


def split_vocabulary(linear: Any, place: ParallelRank) -> SplitProduct:
    """The rank's rows of the head; all have equally many, the last ones' missing rows are 0."""
    vocab_size = len(linear.weight)
    size = -(-vocab_size // place.tensor_size)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if missing := size * place.tensor_size - vocab_size:
        weight = functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else functional.pad(bias, (0, missing))
    rows = slice(place.part * size, (place.part + 1) * size)
    return SplitProduct(weight[rows], None if bias is None else bias[rows])
