"""Answers that are being made, to end all of them where their worker has no more time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdcluster_worker.errors import RequestError


class OpenAnswers:
    """One per HTTP server.  end_relayed: the same for those that a relaying router passes on."""

    end_relayed: Callable[[RequestError], int] = staticmethod(lambda _: 0)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reason: Callable[[], RequestError] | None = None

    def end(self, reason: Callable[[], RequestError]) -> int:
        """Raise this error in each `interruptible` block, from now on; returns how many run."""
        self._reason = reason
        for task in self._tasks:
            task.cancel()
        return len(self._tasks) + self.end_relayed(reason())

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The running task waits for nothing in the block that must not be cut short.  Raises
        RequestError after `end`.
        """
        if self._reason is not None:
            raise self._reason()
        task = asyncio.current_task()
        assert task is not None, "an answer is given in a task"
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # a client that leaves cancels its answer, too
            if self._reason is None or task.uncancel():
                raise
            raise self._reason() from None
        finally:
            self._tasks.discard(task)
