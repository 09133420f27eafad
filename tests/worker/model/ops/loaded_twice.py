"""A program: a thread computes before and after the kernels are loaded a second time, and ends."""

from concurrent.futures import ThreadPoolExecutor

import torch

from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.kernel_object import Kernels, cpu_flags, load_kernels
from tests.worker.model.ops.paged_steps import Case, stored_step

HEADS = Case("", (), num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)


def attend(context: int, kernels: Kernels) -> None:
    """Take the memory of this thread, more of it for a longer context."""
    step = stored_step(HEADS, [(context, context // 2)], torch.float32)
    ops = CpuOperations(step.cache, HEADS.shape, kernels)
    ops.attend(torch.zeros(len(step.plan.slots), HEADS.width), step.plan, 0)


kernels = load_kernels("", cpu_flags())
if isinstance(kernels, Kernels):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(attend, 8, kernels).result()
        again = load_kernels(kernels.level, cpu_flags())
        assert isinstance(again, Kernels)
        thread.submit(attend, 8000, again).result()
