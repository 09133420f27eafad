"""Chooses the operations for a device."""

import logging

from torch import Tensor

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.kernel_arguments import KINDS
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels, requested_level
from pdcluster_worker.model.ops.operations import ALONE, AttentionShape, Group, Operations
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.system.process import keep_freed_memory

logger = logging.getLogger(__name__)


def make_operations(
    cache: Tensor,
    shape: AttentionShape,
    limits: StepLimits,
    *,
    invariant: bool,
    group: Group = ALONE,
) -> Operations:
    """Raises ModelError if `invariant` is impossible, ConfigError for a bad PDCLUSTER_KERNELS."""
    if cache.is_cuda:
        requested_level()
        # needs Triton, which images for CPUs lack
        from pdcluster_worker.model.ops.cuda import CudaOperations

        if invariant:
            raise ModelError("engine.batchInvariant is for CPUs so far, not for cuda: leave it out")
        return CudaOperations(cache, shape, limits, group)
    kernels = find_kernels()
    if isinstance(kernels, Kernels) and cache.dtype in KINDS:
        keep_freed_memory()
        operations = CpuOperations(cache, shape, kernels, group)
        if operations.note:
            logger.warning(operations.note)
        return operations
    reason = (
        f"there are none for {cache.dtype}: set model.dtype to bfloat16 or float32"
        if isinstance(kernels, Kernels)
        else kernels.reason
    )
    if invariant:
        raise ModelError(
            f"engine.batchInvariant needs the compiled kernels: {reason}, or leave "
            "engine.batchInvariant out"
        )
    note = f"computes with plain torch operations, which are slower: {reason}"
    logger.warning(note)
    return Reference(cache, shape, group, note)
