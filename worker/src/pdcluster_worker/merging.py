"""Several streams as one: their items as they come, an error of one ends all.

A task and a queue stand behind it, so a lone stream is better read as it is.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Merged(Generic[ItemT]):
    """Runs all streams at once, each in a task of its own."""

    def __init__(self, streams: Sequence[AsyncGenerator[ItemT, None]]) -> None:
        self._items: asyncio.Queue[tuple[ItemT] | Exception | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(stream)) for stream in streams]

    def end(self, position: int) -> None:
        """Close one stream that has given an item; the others go on.  An ended one is a no-op."""
        self._tasks[position].cancel()

    async def items(self) -> AsyncGenerator[ItemT, None]:
        """Items of all streams, each stream's in order.  Closing this closes all."""
        running = len(self._tasks)
        try:
            while running:
                item = await self._items.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item[0]
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, stream: AsyncGenerator[ItemT, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    self._items.put_nowait((item,))
        except Exception as e:
            end = e
        finally:
            self._items.put_nowait(end)
