"""Threads of a step, where engines of one machine lend each other idle cores."""

import ctypes
import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from pdcluster_worker.machine.shared_cores import SharedCores, core_place
from pdcluster_worker.model.ops.kernel_object import Kernels, kernels_found

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


class LentThreads:
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


def step_threads(environment: Mapping[str, str]) -> StepThreads:
    """Threads of an engine that computes in one process on a CPU.  Raises ConfigError.

    Without kernels there are no lent ones: a plain torch operation takes whatever it began with.
    """
    place, kernels = core_place(environment), kernels_found()
    if place is None or not isinstance(kernels, Kernels):
        return OwnThreads()
    cores = SharedCores(place)
    logger.info("shares cores own=%d most=%d", place.threads[place.place], cores.most)
    return LentThreads(cores, kernels)
