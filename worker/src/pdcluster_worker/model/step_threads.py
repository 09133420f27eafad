"""Threads of a step, where engines of one machine lend each other idle cores."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.system.cpu_cores import SharedCores

logger = logging.getLogger(__name__)


class StepThreads(Protocol):
    def take(self) -> None:
        """Called before each step."""
        ...

    def rest(self) -> None:
        """Until the next step."""
        ...

    def close(self) -> None: ...


class OwnThreads:
    def take(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class SharedThreads:
    """Own threads plus those of idle cores of other engines.

    The kernels check the number after each layer, so a lender waits for a layer and not for a step.
    """

    def __init__(self, cores: SharedCores, kernels: Kernels) -> None:
        self._cores = cores
        self._threads = torch.get_num_threads()
        self._bound = kernels.library.bound
        self._bound(ctypes.c_void_p(cores.address))

    def take(self) -> None:
        threads = self._cores.take()
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def rest(self) -> None:
        self._cores.rest()

    def close(self) -> None:
        self._bound(None)
        self._cores.rest()


class Computing(Protocol):
    threads: StepThreads
    forward: Forward


def share_threads(cores: SharedCores | None, runners: Sequence[Computing]) -> StepThreads:
    """Only our decoder's kernels give threads back within a step; other engines keep their own."""
    kernels = find_kernels()
    threads: StepThreads = OwnThreads()
    is_ours = all(runner.forward.code == Decoder.code for runner in runners)
    if cores is not None and is_ours and isinstance(kernels, Kernels):
        threads = SharedThreads(cores, kernels)
        logger.info("shares cores own=%d most=%d", cores.own, cores.most)
    for runner in runners:
        runner.threads = threads
    return threads
