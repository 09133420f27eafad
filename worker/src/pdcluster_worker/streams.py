"""Streams of items: async generators, and objects with `__anext__` that cost less to resume."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")
ItemT_co = TypeVar("ItemT_co", covariant=True)


class Stream(Protocol[ItemT_co]):
    def __aiter__(self) -> AsyncIterator[ItemT_co]: ...

    def __anext__(self) -> Awaitable[ItemT_co]:
        """Raises StopAsyncIteration at the end."""
        ...

    async def aclose(self) -> None:
        """A no-op after the end."""
        ...


ItemT_contra = TypeVar("ItemT_contra", contravariant=True)


class Reader(Protocol[ItemT_contra]):
    """Push interface: receives items by direct call while ready, without resuming the chain."""

    @property
    def is_open(self) -> bool: ...

    def take(self, item: ItemT_contra) -> None:
        """Never called with the stream's last item."""
        ...


class ReaderGate(Generic[ItemT]):
    """Implements `Reader`: takes nothing until `reader` is set."""

    __slots__ = ("reader",)

    def __init__(self) -> None:
        self.reader: Reader[ItemT] | None = None

    @property
    def is_open(self) -> bool:
        return self.reader is not None and self.reader.is_open

    def take(self, item: ItemT) -> None:
        assert self.reader is not None, "a closed gate is given an item"
        self.reader.take(item)


MadeT = TypeVar("MadeT")


class Mapped(Generic[ItemT, MadeT]):
    """Maps each item for another reader; a chain of them is one loop."""

    __slots__ = ("_end", "_makes")

    def __init__(self, make: Callable[[ItemT], MadeT | None], reader: Reader[MadeT]) -> None:
        """make: returns None where an item gives nothing to read."""
        self._end: Reader[Any] = reader
        self._makes: tuple[Callable[[Any], Any], ...] = (make,)
        if isinstance(reader, Mapped):
            self._end = reader._end
            self._makes += reader._makes

    @property
    def is_open(self) -> bool:
        return self._end.is_open

    def take(self, item: ItemT) -> None:
        made: Any = item
        for make in self._makes:
            if (made := make(made)) is None:
                return
        self._end.take(made)


class Merged(AsyncIterator[ItemT]):
    """Items of several streams as they come, each stream's in order; an error of one ends all."""

    def __init__(self, streams: Sequence[Stream[ItemT]]) -> None:
        self._items: asyncio.Queue[tuple[ItemT] | Exception | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(stream)) for stream in streams]
        self._num_running = len(self._tasks)

    def end(self, position: int) -> None:
        """Close one stream; the others continue."""
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
