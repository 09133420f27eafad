"""Several choices of one prompt as one stream: the first runs ahead, the others start from the prompt that it left in the prefix cache."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from pdcluster_worker.peers.types import Generated

Stream = AsyncGenerator[Generated, None]


class Choices:
    """Runs one stream per choice, by request id, in order.

    The first stream starts at once.  The others start when it has made its
    second token (its whole prompt is then in this worker's cache) or has ended.
    """

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        self._items: asyncio.Queue[Generated | Exception | None] = asyncio.Queue()
        self._prompt_cached = asyncio.Event()
        self._tasks = {
            request_id: asyncio.create_task(self._pump(index, stream)) for index, (request_id, stream) in enumerate(streams.items())
        }

    def abort(self, request_id: str) -> None:
        """End one choice; its siblings go on.  An ended one is a no-op."""
        self._tasks[request_id].cancel()

    async def tokens(self) -> Stream:
        """Tokens of all choices as they come, each with its choice's index.  An error of one ends all; closing this closes all."""
        running = len(self._tasks)
        try:
            while running:
                item = await self._items.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _pump(self, index: int, stream: Stream) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                await self._forward(index, stream)
        except Exception as e:
            end = e
        finally:
            self._items.put_nowait(end)
            if index == 0:
                self._prompt_cached.set()

    async def _forward(self, index: int, stream: Stream) -> None:
        if index > 0:
            await self._prompt_cached.wait()
        count = 0
        async for generated in stream:
            self._items.put_nowait(replace(generated, index=index))
            count += 1
            if index == 0 and count == 2:
                self._prompt_cached.set()
