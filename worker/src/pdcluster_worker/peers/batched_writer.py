"""Frames of a `generate` stream: items put at one moment, as tokens of a step, are one message."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import encode
from pdcluster_worker.peers.calls import MAX_MESSAGE_BYTES

FRAME_BYTES = 1 << 20
"""A frame ends with the item that passes this: far below the longest message, and one item may be
as long as that.
"""

MAX_ITEM_BYTES = MAX_MESSAGE_BYTES - 4 * FRAME_BYTES
"""The rest is for the items before it in its frame, and their framing."""

FULL = 1024
"""Items that wait at most before their makers wait too."""

_ARRAY = b"\xdd"  # begins a list in MessagePack, before its length of four bytes


class BatchedWriter:
    """write: sends a frame; waits while the other end reads nothing.

    left_out: called with an item that is too long, and its error; returns one to send instead.
    """

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[Any]],
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
        self._items.append(item)
        self._num_put += 1
        self._came.set()
        if len(self._items) >= FULL:
            self._writable.clear()

    @property
    def is_full(self) -> bool:
        return not self._writable.is_set()

    async def wait_until_writable(self) -> None:
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
                items, num_taken = self._frame()
                if items:
                    await self._write(_ARRAY + len(items).to_bytes(4) + b"".join(items))
                self._note_written(num_taken)
            self._writable.set()

    def _note_written(self, num_items: int) -> None:
        self._num_written += num_items
        while self._waiting and self._waiting[0][0] <= self._num_written:
            future = self._waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    def _frame(self) -> tuple[list[bytes], int]:
        """Items of the next frame, and the number of items taken for it."""
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
        return items, num_taken


def too_long(num_bytes: int) -> RequestError:
    return RequestError(
        f"the request or its answer takes {num_bytes} bytes in a message between workers, and may "
        f"take {MAX_ITEM_BYTES}: send a shorter prompt or schema, or ask for fewer logprobs",
        status=413,
        code="message_too_large",
    )
