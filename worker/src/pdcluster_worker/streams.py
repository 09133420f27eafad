"""Streams of items: async generators, and objects that are read like one.

A chain of generators costs one resumption of each for every item, so what only passes
items on is an object with `__anext__`.  Like a generator a stream has one reader at a
time, and ends early by `aclose`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")
ItemT_co = TypeVar("ItemT_co", covariant=True)


class Stream(Protocol[ItemT_co]):
    """Items as they come; every async generator is one."""

    def __aiter__(self) -> AsyncIterator[ItemT_co]:
        """Return the stream itself."""
        ...

    def __anext__(self) -> Awaitable[ItemT_co]:
        """Wait for the next item.  Raises StopAsyncIteration at the end."""
        ...

    async def aclose(self) -> None:
        """End it now; of one that has ended a no-op."""
        ...


ItemT_contra = TypeVar("ItemT_contra", contravariant=True)


class Reader(Protocol[ItemT_contra]):
    """Takes a stream's items by a call each, while nothing holds it up: so none of the chain that
    the stream goes through has to be resumed for them.
    """

    @property
    def is_open(self) -> bool:
        """True if it takes an item now."""
        ...

    def take(self, item: ItemT_contra) -> None:
        """Take an item, which is never the stream's last."""
        ...


MadeT = TypeVar("MadeT")


class Mapped(Generic[ItemT, MadeT]):
    """Implements `Reader`: gives another one what is made of each item.

    Several in a row are one loop over what they make, not a call within a call.
    """

    __slots__ = ("_end", "_makes")

    def __init__(self, make: Callable[[ItemT], MadeT | None], reader: Reader[MadeT]) -> None:
        """make: returns None where an item makes nothing to read."""
        self._end: Reader[Any] = reader
        self._makes: tuple[Callable[[Any], Any], ...] = (make,)
        if isinstance(reader, Mapped):
            self._end = reader._end
            self._makes += reader._makes

    @property
    def is_open(self) -> bool:
        """See `Reader`."""
        return self._end.is_open

    def take(self, item: ItemT) -> None:
        """See `Reader`."""
        made: Any = item
        for make in self._makes:
            if (made := make(made)) is None:
                return
        self._end.take(made)


class Merged(AsyncIterator[ItemT]):
    """Several streams as one: their items as they come, each stream's in order; an error of one
    ends all.

    A task for each stream and a queue stand behind it, so a lone stream is better read as it is.
    """

    def __init__(self, streams: Sequence[Stream[ItemT]]) -> None:
        self._items: asyncio.Queue[tuple[ItemT] | Exception | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(stream)) for stream in streams]
        self._num_running = len(self._tasks)

    def end(self, position: int) -> None:
        """Close one stream that has given an item; the others go on.  An ended one is a no-op."""
        self._tasks[position].cancel()

    async def __anext__(self) -> ItemT:
        while self._num_running:
            item = await self._items.get()
            if item is None:
                self._num_running -= 1
            elif isinstance(item, Exception):
                await self.aclose()
                raise item
            else:
                return item[0]
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Close all streams."""
        self._num_running = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, stream: Stream[ItemT]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    self._items.put_nowait((item,))
        except Exception as e:
            end = e
        finally:
            self._items.put_nowait(end)
