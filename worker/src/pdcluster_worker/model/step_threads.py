"""Threads of a step, where engines of one machine lend each other idle cores."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.forward import Forward
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.system.shared_cores import SharedCores

logger = logging.getLogger(__name__)


class StepThreads(Protocol):
    """Threads that the steps of one engine take."""

    def take(self) -> None:
        """Take as many as there are for the step that begins now."""
        ...

    def rest(self) -> None:
        """Give them back until the next step."""
        ...

    def close(self) -> None:
        """Give them back for good: no step comes any more."""
        ...


class OwnThreads:
    """Always the same."""

    def take(self) -> None:
        """See `StepThreads`."""

    def rest(self) -> None:
        """See `StepThreads`."""

    def close(self) -> None:
        """See `StepThreads`."""


class SharedThreads:
    """The engine's own, and those of cores that others leave to it.

    For the thread that computes: OpenMP keeps a number of threads for each.  The
    kernels also look at the number after each layer, so that an engine which begins to
    work waits for a layer and not for a step.
    """

    def __init__(self, cores: SharedCores, kernels: Kernels) -> None:
        self._cores = cores
        self._threads = torch.get_num_threads()
        self._bound = kernels.library.bound
        self._bound(ctypes.c_void_p(cores.address))

    def take(self) -> None:
        """See `StepThreads`."""
        threads = self._cores.take()
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def rest(self) -> None:
        """See `StepThreads`."""
        self._cores.rest()

    def close(self) -> None:
        """See `StepThreads`."""
        self._bound(None)
        self._cores.rest()


class Computing(Protocol):
    """A runner."""

    threads: StepThreads
    forward: Forward


def share_threads(cores: SharedCores | None, runners: Sequence[Computing]) -> StepThreads:
    """Give the runners of an engine, which computes in one process, the threads of their steps.

    cores: None where it shares none.
    Only the layers of our decoder by kernels give threads back within a step: an operation of
    torch ends with those that it began with.  An engine without them works all the time.
    """
    kernels = find_kernels()
    threads: StepThreads = OwnThreads()
    is_ours = all(runner.forward.code == Decoder.code for runner in runners)
    if cores is not None and is_ours and isinstance(kernels, Kernels):
        threads = SharedThreads(cores, kernels)
        logger.info("shares cores own=%d most=%d", cores.own, cores.most)
    for runner in runners:
        runner.threads = threads
    return threads
