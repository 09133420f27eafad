"""The operations for a device: the one place that knows which implementation is whose."""

from torch import Tensor

from pdcluster_worker.model.ops.operations import AttentionShape, Operations
from pdcluster_worker.model.ops.reference import Reference
from pdcluster_worker.model.ops.step_limits import StepLimits


def make_operations(cache: Tensor, shape: AttentionShape, limits: StepLimits) -> Operations:
    """Operations for the device that holds the KV cache."""
    if cache.is_cuda:
        from pdcluster_worker.model.ops.cuda import CudaOperations  # needs Triton, which images for CPUs lack

        return CudaOperations(cache, shape, limits)
    return Reference(cache, shape)
