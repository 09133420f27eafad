"""Choices of one prompt as one stream: the first leaves the prompt in the cache."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from msgspec.structs import replace

from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.streams import Merged, Stream


class ParallelSampling(AsyncIterator[Generated]):
    """The others start when the first has made its second token, or has ended."""

    def __init__(self, streams: Mapping[str, Stream[Generated]]) -> None:
        prompt_cached = asyncio.Event()
        self._positions = {request_id: index for index, request_id in enumerate(streams)}
        self._merged = Merged(
            [
                _ParallelChoice(index, stream, prompt_cached)
                for index, stream in enumerate(streams.values())
            ]
        )

    def abort(self, request_id: str) -> None:
        """End one choice; its siblings go on.  An ended one is a no-op."""
        self._merged.end(self._positions[request_id])

    async def __anext__(self) -> Generated:
        return await anext(self._merged)

    async def aclose(self) -> None:
        await self._merged.aclose()


class _ParallelChoice(AsyncIterator[Generated]):
    """One choice.  prompt_cached: set by the first one, waited for by the others."""

    def __init__(self, index: int, stream: Stream[Generated], prompt_cached: asyncio.Event) -> None:
        self._index = index
        self._stream = stream
        self._prompt_cached = prompt_cached
        self._num_tokens = 0

    async def __anext__(self) -> Generated:
        if self._index > 0:
            await self._prompt_cached.wait()
        generated = await anext(self._stream)
        self._num_tokens += 1
        if self._index == 0 and self._num_tokens == 2:
            self._prompt_cached.set()
        return replace(generated, index=self._index)

    async def aclose(self) -> None:
        """End it; the others wait no more for the first one."""
        if self._index == 0:
            self._prompt_cached.set()
        await self._stream.aclose()
