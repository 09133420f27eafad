"""Several choices of one prompt as one stream: the first runs ahead, the others start from the prompt that it left in the prefix cache."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from msgspec.structs import replace

from pdcluster_worker.merging import Merged
from pdcluster_worker.messages.peers import Generated

Stream = AsyncGenerator[Generated, None]


class Choices:
    """Runs one stream per choice, by request id, in order.

    The first stream starts at once.  The others start when it has made its
    second token (its whole prompt is then in this worker's cache) or has ended.
    """

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        self._prompt_cached = asyncio.Event()
        self._positions = {request_id: index for index, request_id in enumerate(streams)}
        self._merged = Merged([self._choice(index, stream) for index, stream in enumerate(streams.values())])

    def abort(self, request_id: str) -> None:
        """End one choice; its siblings go on.  An ended one is a no-op."""
        self._merged.end(self._positions[request_id])

    def tokens(self) -> Stream:
        """Tokens of all choices as they come, each with its choice's index.  An error of one ends all; closing this closes all."""
        return self._merged.items()

    async def _choice(self, index: int, stream: Stream) -> Stream:
        count = 0
        try:
            async with aclosing(stream):
                if index > 0:
                    await self._prompt_cached.wait()
                async for generated in stream:
                    yield replace(generated, index=index)
                    count += 1
                    if index == 0 and count == 2:
                        self._prompt_cached.set()
        finally:
            if index == 0:
                self._prompt_cached.set()
