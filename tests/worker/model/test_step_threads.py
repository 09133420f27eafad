"""Threads of a step follow the cores that are lent; a lone engine keeps its own."""

import json

import pytest
import torch

from pdcluster_worker.machine.shared_cores import VARIABLE, CorePlace, SharedCores
from pdcluster_worker.model.ops.kernel_object import Kernels, kernels_found
from pdcluster_worker.model.step_threads import LentThreads, OwnThreads, step_threads


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    place = {"path": str(tmp_path / "cores"), "place": 0, "threads": [1, 1], "cores": 2}
    return {VARIABLE: json.dumps(place)}


def test_steps_take_the_cores_that_another_engine_leaves(environment, tmp_path, one_thread):
    if not isinstance(kernels_found(), Kernels):
        pytest.skip("no kernels are built here")
    other = SharedCores(CorePlace(str(tmp_path / "cores"), 1, (1, 1), 2))
    threads = step_threads(environment)
    assert isinstance(threads, LentThreads)
    threads.take()
    assert torch.get_num_threads() == 1

    other.rest()
    threads.take()
    assert torch.get_num_threads() == 2

    other.take()
    threads.take()
    assert torch.get_num_threads() == 1

    threads.close()
    assert other.take() == 2


def test_without_a_place_or_kernels_threads_stay(environment, one_thread, monkeypatch):
    assert isinstance(step_threads({}), OwnThreads)
    monkeypatch.setenv("PDCLUSTER_KERNELS", "off")
    threads = step_threads(environment)
    assert isinstance(threads, OwnThreads)
    threads.take()
    threads.rest()
    threads.close()
    assert torch.get_num_threads() == 1
