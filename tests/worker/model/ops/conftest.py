"""The kernels of each level that this CPU runs."""

from collections.abc import Callable, Iterator

import pytest
import torch

from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.kernel_object import LEVELS, Kernels, cpu_flags, load_kernels
from tests.worker.model.ops.paged_steps import Step


@pytest.fixture(scope="session", params=list(LEVELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found = load_kernels(request.param, cpu_flags())
    if not isinstance(found, Kernels):
        pytest.skip(found.reason)
    return found


@pytest.fixture
def make_cpu(kernels: Kernels) -> Callable[[Step], CpuOperations]:
    """Operations over a step's cache."""
    return lambda step: CpuOperations(step.cache, step.case.shape, kernels)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture
def each_thread_count() -> Iterator[Callable[[], Iterator[int]]]:
    """Sets torch's threads to each count in turn."""

    def counts() -> Iterator[int]:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            yield count

    before = torch.get_num_threads()
    yield counts
    torch.set_num_threads(before)
