"""A rank's share of a layer's products (Megatron-style).

Outputs of q, k, v, gate and up, inputs of o and down, and the head's vocabulary are split.
"""

from torch.nn import functional

from pdcluster_worker.model.loading.checkpoint import Linear
from pdcluster_worker.model.parallel.rank_layout import ParallelRank


def split_outputs(linear: Linear, rank: ParallelRank) -> Linear:
    """The rank's rows, and their biases."""
    share = rank.share(len(linear.weight))
    return Linear(linear.weight[share], None if linear.bias is None else linear.bias[share])


def split_inputs(linear: Linear, rank: ParallelRank) -> Linear:
    """The rank's columns.  The results are summed, so the first rank alone adds the bias."""
    share = rank.share(linear.weight.shape[1])
    return Linear(linear.weight[:, share], None if rank.part else linear.bias)


def split_vocabulary(linear: Linear, rank: ParallelRank) -> Linear:
    """The rank's rows of the head; all have equally many, the last ones' missing rows are 0."""
    vocab_size = len(linear.weight)
    size = -(-vocab_size // rank.tensor_size)
    weight, bias = linear.weight, linear.bias
    if missing := size * rank.tensor_size - vocab_size:
        weight = functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else functional.pad(bias, (0, missing))
    rows = slice(rank.part * size, (rank.part + 1) * size)
    return Linear(weight[rows], None if bias is None else bias[rows])
