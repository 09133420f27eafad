"""Threads of a step follow the cores that are lent; a lone engine keeps its own."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.model.runner import SharedThreads, StepThreads, share_threads
from pdcluster_worker.system.cpu_cores import CoreShare, SharedCores


@pytest.fixture
def engines(tmp_path) -> list[SharedCores]:
    """Two of one thread each, on two cores."""
    return [SharedCores(CoreShare(str(tmp_path / "cores"), place, (1, 1), 2)) for place in (0, 1)]


@pytest.fixture
def lent(engines) -> Iterator[SharedThreads]:
    """Threads of the first one."""
    if not isinstance(find_kernels(), Kernels):
        pytest.skip("no kernels are built here")
    threads = share_threads(engines[0], [computing()])
    assert isinstance(threads, SharedThreads)
    yield threads
    threads.close()


def test_steps_take_the_cores_that_another_engine_leaves(engines, lent):
    other = engines[1]
    lent.take()
    assert torch.get_num_threads() == 1

    other.rest()
    lent.take()
    assert torch.get_num_threads() == 2

    other.take()
    lent.take()
    assert torch.get_num_threads() == 1

    lent.close()
    assert other.take() == 2


def test_a_draft_model_has_the_threads_of_its_engine(engines, lent):
    runners = [computing(), computing()]
    threads = share_threads(engines[0], runners)
    assert [runner.threads for runner in runners] == [threads, threads]


def computing(code: str = "decoder") -> SimpleNamespace:
    """A runner."""
    return SimpleNamespace(threads=StepThreads(), forward=SimpleNamespace(code=code))


def test_threads_stay_without_a_place_or_kernels_or_our_decoder(engines, monkeypatch):
    """Such an engine works all the time, so it lends nothing either."""
    transformers = computing("transformers")
    found = [
        share_threads(None, [computing()]),
        share_threads(engines[0], [computing(), transformers]),
    ]
    assert transformers.threads is found[1]
    monkeypatch.setenv("PDCLUSTER_KERNELS", "off")
    found.append(share_threads(engines[0], [computing()]))
    for threads in found:
        assert not isinstance(threads, SharedThreads)
        threads.take()
        threads.rest()
        threads.close()
    assert torch.get_num_threads() == 1
    assert engines[1].take() == 1
