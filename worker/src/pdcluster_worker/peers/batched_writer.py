"""The way out of a stream of frames: what is put at one moment goes out as one message.

A message costs more than what is in it, and tokens of one step come together.  A frame that is
being written holds up what comes meanwhile, which is the next frame.  A message above gRPC's limit
would end the stream with all that is on it, so an item that is too long for one is left out.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.generate import encode
from pdcluster_worker.peers.options import MAX_MESSAGE_BYTES
from pdcluster_worker.proto import worker_pb2 as pb

FRAME_BYTES = 1 << 20
"""A frame ends with the item that passes this: far below the longest message, and one item may be
as long as that.
"""

MAX_ITEM_BYTES = MAX_MESSAGE_BYTES - 4 * FRAME_BYTES
"""The rest is for the items before it in its frame, and their framing."""

FULL = 1024
"""Items that wait at most before their makers wait too."""


class BatchedWriter:
    """One end's frames.

    write:    sends one; waits while the other end takes nothing.
    left_out: called with an item that is too long to be sent, and its error; returns an item to be
              sent instead, or None.
    """

    def __init__(
        self,
        write: Callable[[pb.Frame], Awaitable[Any]],
        left_out: Callable[[Any, RequestError], Any],
    ) -> None:
        self._write = write
        self._left_out = left_out
        self._items: deque[Any] = deque()
        self._came = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._num_put = self._num_written = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def put(self, item: Any) -> None:
        """Send an item with the next frame."""
        self._items.append(item)
        self._num_put += 1
        self._came.set()
        if len(self._items) >= FULL:
            self._writable.clear()

    @property
    def is_full(self) -> bool:
        """True while more should wait for `wait_until_writable`."""
        return not self._writable.is_set()

    async def wait_until_writable(self) -> None:
        """Wait until frames have gone out."""
        await self._writable.wait()

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
                frame, num_taken = self._frame()
                if frame.items:
                    await self._write(frame)
                self._note_written(num_taken)
            self._writable.set()

    def _note_written(self, num_items: int) -> None:
        self._num_written += num_items
        while self._waiting and self._waiting[0][0] <= self._num_written:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    def _frame(self) -> tuple[pb.Frame, int]:
        """The next frame, and the number of items taken for it."""
        items: list[bytes] = []
        num_bytes = num_taken = 0
        while self._items and num_bytes < FRAME_BYTES:
            item = self._items.popleft()
            num_taken += 1
            encoded = encode(item)
            if len(encoded) > MAX_ITEM_BYTES:
                instead = self._left_out(item, too_long(len(encoded)))
                if instead is None:
                    continue
                encoded = encode(instead)
            items.append(encoded)
            num_bytes += len(encoded)
        return pb.Frame(items=items), num_taken


def too_long(num_bytes: int) -> RequestError:
    """The error of a request that no message between workers holds."""
    return RequestError(
        f"the request or its answer takes {num_bytes} bytes in a message between workers, and may "
        f"take {MAX_ITEM_BYTES}: send a shorter prompt or schema, or ask for fewer logprobs",
        status=413,
        code="message_too_large",
    )
