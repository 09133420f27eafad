"""Chooses the operations of this process once, at load."""

import logging

from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.freed_memory import keep_freed_memory
from pdcluster_worker.model.ops.kernel_arguments import KINDS
from pdcluster_worker.model.ops.kernel_object import Kernels, kernels_found
from pdcluster_worker.model.ops.operations import AttentionShape, Operations
from pdcluster_worker.model.ops.reference import Reference

logger = logging.getLogger(__name__)


def make_operations(cache: Tensor, shape: AttentionShape, *, invariant: bool) -> Operations:
    """Operations over this KV cache.  Raises ModelError where `invariant` cannot be had."""
    kernels = kernels_found()
    if isinstance(kernels, Kernels) and cache.dtype in KINDS:
        keep_freed_memory()
        return CpuOperations(cache, shape, kernels)
    reason = f"there are none for {cache.dtype}" if isinstance(kernels, Kernels) else kernels.reason
    if invariant:
        raise ModelError(f"engine.batchInvariant needs the compiled kernels: {reason}; leave it out or install with kernels")
    logger.warning("computes with plain torch operations, which are slower: %s", reason)
    return Reference(cache, shape)
