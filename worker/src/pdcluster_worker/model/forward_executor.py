"""Starts forward passes: inline, or in a thread so that the next batch is planned meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

Pass = Callable[[], tuple[Tensor, float]]  # returns the logits of a step and its seconds


class ForwardExecutor(Protocol):
    depth: int  # batches that are submitted at a time

    def begin(self, forward: Pass) -> "Future[tuple[Tensor, float]]":
        """Exceptions are set on the future."""
        ...

    def close(self) -> None:
        """Wait for the running pass."""
        ...


class InlineExecutor:
    """In the caller's thread; a pass on a GPU (`depth` 2) is only launched."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    def begin(self, forward: Pass) -> "Future[tuple[Tensor, float]]":
        future: Future[tuple[Tensor, float]] = Future()
        try:
            future.set_result(forward())
        except Exception as e:
            future.set_exception(e)
        return future

    def close(self) -> None:
        pass


class ThreadExecutor:
    """In its own thread, with as many OpenMP threads as the caller has."""

    depth = 2

    def __init__(self) -> None:
        # OpenMP and torch keep that number for each thread that begins products.
        self._pool = ThreadPoolExecutor(
            1, "forward", torch.set_num_threads, (torch.get_num_threads(),)
        )

    def begin(self, forward: Pass) -> "Future[tuple[Tensor, float]]":
        return self._pool.submit(forward)

    def close(self) -> None:
        self._pool.shutdown()
