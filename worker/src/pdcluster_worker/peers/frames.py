"""The way out of a stream of frames: what is put at one moment goes out as one message.

A message costs more than what is in it, and tokens of one step come together.  A frame that is
being written holds up what comes meanwhile, which is the next frame.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pdcluster_worker.messages.generate import encode
from pdcluster_worker.proto import worker_pb2 as pb

FRAME_BYTES = 1 << 20
"""A frame ends with the item that passes this: far below the longest message, and one item may be
as long as that.
"""

FULL = 1024
"""Items that wait at most before their makers wait too."""


class FramesOut:
    """One end's frames.  write: sends one; waits while the other end takes nothing."""

    def __init__(self, write: Callable[[pb.Frame], Awaitable[Any]]) -> None:
        self._write = write
        self._items: deque[Any] = deque()
        self._came = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._num_put = self._num_written = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def put(self, item: Any) -> None:
        """Send an item with the next frame."""
        self._items.append(item)
        self._num_put += 1
        self._came.set()
        if len(self._items) >= FULL:
            self._has_room.clear()

    @property
    def is_full(self) -> bool:
        """True while more should wait for `room`."""
        return not self._has_room.is_set()

    async def room(self) -> None:
        """Wait until frames have gone out."""
        await self._has_room.wait()

    async def written(self) -> None:
        """Wait until all that was put so far is with the connection."""
        if self._num_written < self._num_put:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self._num_put, future))
            await future

    async def run(self) -> None:
        """Write frames until cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._items:
                frame = self._frame()
                await self._write(frame)
                self._note_written(len(frame.items))
            self._has_room.set()

    def _note_written(self, num_items: int) -> None:
        self._num_written += num_items
        while self._waiting and self._waiting[0][0] <= self._num_written:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    def _frame(self) -> pb.Frame:
        items: list[bytes] = []
        num_bytes = 0
        while self._items and num_bytes < FRAME_BYTES:
            items.append(encode(self._items.popleft()))
            num_bytes += len(items[-1])
        return pb.Frame(items=items)
