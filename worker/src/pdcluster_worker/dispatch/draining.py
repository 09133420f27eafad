"""Whether this worker takes its leave, and how far it is: ready, draining, drained.

Level-triggered: the state follows from what is wanted now (the operator's
command, which comes and goes, or the end of the process, which stays) and from
what still holds the worker.  So the last word wins however quickly commands
follow each other, and a drained worker is draining again while something that
slipped in runs.  What a state means for requests and peers is the caller's.
"""

import asyncio
from collections.abc import Callable

from pdcluster_worker.peers.records import WorkerState

CHECK_SECONDS = 0.1
"""How often a draining worker looks whether it is done: what holds it lies in several rooms, and none of them knows of a drain."""


class Drain:
    """One per worker, which is ready at first.

    num_holding: how many things must end before the worker may go.
    announce:    told of each new state, at once.
    """

    def __init__(self, num_holding: Callable[[], int], announce: Callable[[WorkerState], None]) -> None:
        self.state: WorkerState = "ready"
        self._num_holding = num_holding
        self._announce = announce
        self._is_commanded = False
        self._is_ending = False
        self._looking: asyncio.Task[None] | None = None
        self._is_drained = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether the worker should leave."""
        return self._is_commanded or self._is_ending

    @property
    def num_holding(self) -> int:
        """What a worker that should leave still waits for; 0 for one that should not."""
        return self._num_holding() if self.is_wanted else 0

    def command(self, present: bool) -> None:
        """The operator's key: present = drain, absent = serve."""
        self._is_commanded = present
        self._want()

    def end(self) -> None:
        """The process is to end; no command takes that back."""
        self._is_ending = True
        self._want()

    def look(self) -> None:
        """Bring the state up to date."""
        state: WorkerState = "ready" if not self.is_wanted else "draining" if self._num_holding() else "drained"
        if state != self.state:
            self.state = state
            self._announce(state)
        if state == "drained":
            self._is_drained.set()
        else:
            self._is_drained.clear()

    async def drained(self) -> None:
        """Return while nothing holds the worker: that is so until the caller next waits for something."""
        self.look()
        while self.state != "drained":
            await self._is_drained.wait()
            self.look()

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def _want(self) -> None:
        self.look()
        if self.is_wanted and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_until_unwanted(), name="drain")

    async def _look_until_unwanted(self) -> None:
        while self.is_wanted:
            await asyncio.sleep(CHECK_SECONDS)
            self.look()
