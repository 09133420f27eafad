"""A stand-in for the runtime of a process that is to end."""

import asyncio
from math import inf

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
DEADLINE_SECONDS = 10


class LeavingNode:
    """A node that is drained while `is_drained`; counts calls of `leave`."""

    def __init__(self) -> None:
        self.is_drained = True
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_leaves = 0
        self.finished = False
        self.seconds_left = inf

    async def leave(self) -> None:
        self.num_leaves += 1
        await self.idle.wait()
        self.is_drained = True

    async def finish(self) -> None:
        self.finished = True

    def refuse(self) -> None:
        self.finished = True

    def hold(self) -> None:
        self.idle.clear()
        self.is_drained = False
