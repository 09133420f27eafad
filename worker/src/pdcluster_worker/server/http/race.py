"""Two answers to one request, of which the client gets the one that begins first."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from pdcluster_worker.errors import RequestError

Entrant = Callable[[Send], Awaitable[None]]
"""Sends an answer.  Raises RequestError before it begins, or ends without one."""


class Race:
    """winner: index of the entrant whose answer began first; None = none has.

    ends: of each entrant, once all have ended
    """

    def __init__(self, send: Send) -> None:
        self.winner: int | None = None
        self.ends: list[BaseException | None] = []
        self._send = send
        self._refusals: dict[int, list[Message]] = {}  # errors that came while the other one ran
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, *entrants: Entrant) -> None:
        """Return when the answer has been sent.  Raises what the winner does, or the first one
        where there is none.
        """
        self._tasks = [
            asyncio.create_task(self._enter(index, entrant), name=f"race {index}")
            for index, entrant in enumerate(entrants)
        ]
        try:
            await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            self.ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.winner is None:
            await self._refuse()
        elif isinstance(end := self.ends[self.winner], Exception):
            raise end

    async def _refuse(self) -> None:
        """With the first one's error."""
        for index, end in enumerate(self.ends):
            for message in self._refusals.get(index, ()):
                await self._send(message)
            if index in self._refusals:
                return
            if isinstance(end, Exception):
                raise end
        raise RequestError("no model has answered: retry later", status=503)

    async def _enter(self, index: int, entrant: Entrant) -> None:
        async def send(message: Message) -> None:
            if self.winner is None and index not in self._refusals:
                self._begin(index, message)
            if self.winner == index:
                await self._send(message)
                return
            if index in self._refusals:
                self._refusals[index].append(message)
                return
            raise asyncio.CancelledError  # it came while it was being cancelled

        await entrant(send)

    def _begin(self, index: int, message: Message) -> None:
        """An error wins where no other one runs."""
        others = [task for each, task in enumerate(self._tasks) if each != index]
        if message.get("status", 200) >= 400 and not all(task.done() for task in others):
            self._refusals[index] = []
            return
        self.winner = index
        for task in others:
            task.cancel()
