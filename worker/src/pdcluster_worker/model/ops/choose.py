"""Chooses the operations of this process once, at load."""

from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.operations import AttentionShape, Operations
from pdcluster_worker.model.ops.reference import Reference


def make_operations(cache: Tensor, shape: AttentionShape, *, invariant: bool) -> Operations:
    """Operations over this KV cache.  Raises ModelError where `invariant` cannot be had."""
    if invariant:
        raise ModelError("engine.batchInvariant needs the compiled kernels, which this installation lacks: leave it out")
    return Reference(cache, shape)
