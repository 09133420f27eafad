"""Ways to begin a forward pass, and the number of batches that a runner takes at once for that.

A GPU computes while its host goes on, and so does a thread of its own on a CPU;
there a second batch is taken meanwhile.  Where neither is wanted the pass is done
when it has begun, and a batch is waited for before the next.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

Pass = Callable[[], tuple[Tensor, float]]
"""Computes the logits of a step, and says how many seconds that took."""


class ForwardExecutor(Protocol):
    """Begins forward passes, one after another."""

    depth: int
    """See `engine.ports.ModelRunner`."""

    def begin(self, forward: Pass) -> "Future[tuple[Tensor, float]]":
        """Begin one pass; what it raises, the future does."""
        ...

    def close(self) -> None:
        """Wait for the pass that is under way."""
        ...


class InlineExecutor:
    """In the caller's thread: of a CPU, done at once; of a GPU (`depth` 2), launched."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    def begin(self, forward: Pass) -> "Future[tuple[Tensor, float]]":
        """See `ForwardExecutor`."""
        future: Future[tuple[Tensor, float]] = Future()
        try:
            future.set_result(forward())
        except Exception as e:
            future.set_exception(e)
        return future

    def close(self) -> None:
        """See `ForwardExecutor`: nothing is under way."""


class ThreadExecutor:
    """In a thread of its own, with as many threads for its products as the caller has."""

    depth = 2

    def __init__(self) -> None:
        # OpenMP and torch keep that number for each thread that begins products.
        self._pool = ThreadPoolExecutor(
            1, "forward", torch.set_num_threads, (torch.get_num_threads(),)
        )

    def begin(self, forward: Pass) -> "Future[tuple[Tensor, float]]":
        """See `ForwardExecutor`."""
        return self._pool.submit(forward)

    def close(self) -> None:
        """See `ForwardExecutor`."""
        self._pool.shutdown()
