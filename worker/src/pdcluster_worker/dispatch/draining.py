"""Whether this worker takes its leave, and how far it is: ready, draining, drained.

Level-triggered: the state follows from what is wanted now (the operator's
command, which comes and goes, or the end of the process, which stays) and from
what still holds the worker.  So the last word wins however quickly commands
follow each other, and a drained worker is draining again while something that
slipped in runs.  What a state means for requests and peers is the caller's.

When the last request has ended its answer may still be on the way: the worker
has drained when its clients have taken all.  Who these are is seen once, when the
last request has ended: what is sent later, such as refusals and scrapes, holds
nothing, however much of it there is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from pdcluster_worker.peers.records import WorkerState

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.1
"""How often a draining worker looks whether it is done: what holds it lies in several rooms, and none of them knows of a drain."""

UNSENT_CHECK_SECONDS = 0.5
"""The same while only clients hold it that read slowly, for to ask the kernel costs more."""


class Drain:
    """One per worker, which is ready at first.

    num_holding: how many things must end before the worker may go.
    announce:    told of each new state, at once.
    untaken:     names of the connections whose clients have yet to take something of their answers; asked when nothing else holds.
    """

    def __init__(
        self, num_holding: Callable[[], int], announce: Callable[[WorkerState], None], untaken: Callable[[], Awaitable[frozenset[str]]]
    ) -> None:
        self.state: WorkerState = "ready"
        self._num_holding = num_holding
        self._announce = announce
        self._ask_untaken = untaken
        self._untaken: frozenset[str] | None = None  # what is left of the connections of the first look; None before it
        self._cannot_ask = False
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
        return self._num_holding() + len(self._untaken or ()) if self.is_wanted else 0

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
            self._sent, self._untaken = "unknown", None
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
            await asyncio.sleep(UNSENT_CHECK_SECONDS if self._untaken or self._cannot_ask else CHECK_SECONDS)

    async def _look_at_clients(self) -> None:
        self._sent = "asking"
        try:
            untaken = await self._ask_untaken()
        except Exception:  # such as no thread to be had: a drain that ended here would never be over
            if not self._cannot_ask:
                logger.exception("cannot see what clients have yet to take, tried again every %g s", UNSENT_CHECK_SECONDS)
            self._sent, self._cannot_ask = "unknown", True
            return
        self._cannot_ask = False
        if self._sent == "asking":  # else something slipped in, or the command was withdrawn: `look` saw it
            self._untaken = untaken if self._untaken is None else self._untaken & untaken
            self._sent = "unknown" if self._untaken else "all"
            self.look()
