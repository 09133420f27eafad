"""Whether this worker takes its leave, and how far it is: ready, draining, drained.

Level-triggered: the state follows from what is wanted now (the operator's
command, which comes and goes, or the end of the process, which stays) and from
what still holds the worker.  So the last word wins however quickly commands
follow each other, and a drained worker is draining again while something that
slipped in runs.  What a state means for requests and peers is the caller's.

When the last request has ended its answer may still be on the way: the worker
has drained when its clients have taken all.  What is sent by one that has
drained (scrapes, refusals) holds nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from pdcluster_worker.peers.records import WorkerState

CHECK_SECONDS = 0.1
"""How often a draining worker looks whether it is done: what holds it lies in several rooms, and none of them knows of a drain."""

UNSENT_CHECK_SECONDS = 0.5
"""The same while only clients hold it that read slowly, for to ask the kernel costs more."""


class Drain:
    """One per worker, which is ready at first.

    num_holding: how many things must end before the worker may go.
    announce:    told of each new state, at once.
    num_unsent:  how many clients have yet to take something of their answers; asked when nothing else holds.
    """

    def __init__(
        self, num_holding: Callable[[], int], announce: Callable[[WorkerState], None], num_unsent: Callable[[], Awaitable[int]]
    ) -> None:
        self.state: WorkerState = "ready"
        self._num_holding = num_holding
        self._announce = announce
        self._ask_num_unsent = num_unsent
        self._num_unsent = 0
        self._sent: Literal["unknown", "asking", "all"] = "unknown"
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
        return self._num_holding() + self._num_unsent if self.is_wanted else 0

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
        if not self.is_wanted or self._num_holding():
            self._sent, self._num_unsent = "unknown", 0
        state: WorkerState = "ready" if not self.is_wanted else "drained" if self._sent == "all" else "draining"
        if state != self.state:
            self.state = state
            self._announce(state)
        if state == "drained":
            self._is_drained.set()
        else:
            self._is_drained.clear()

    async def drained(self) -> None:
        """After `command` or `end`: return while nothing holds the worker; that is so until the caller next waits for something."""
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
            self.look()
            if self.state == "draining" and not self._num_holding():
                await self._look_at_clients()
            await asyncio.sleep(UNSENT_CHECK_SECONDS if self._num_unsent else CHECK_SECONDS)

    async def _look_at_clients(self) -> None:
        self._sent = "asking"
        num_unsent = await self._ask_num_unsent()
        if self._sent == "asking":  # else something slipped in, or the command was withdrawn: `look` saw it
            self._num_unsent = num_unsent
            self._sent = "unknown" if num_unsent else "all"
            self.look()
