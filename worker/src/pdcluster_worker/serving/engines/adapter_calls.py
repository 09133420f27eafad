"""Adapters that an engine loads and unloads while it runs, seen from the server process."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.adapters import (
    AdapterReply,
    LoadAdapter,
    ResidentAdapters,
    UnloadAdapter,
)
from pdcluster_worker.messages.engine import EngineInput


class AdapterCalls:
    """resident: fingerprints of those that take requests, by name; none of `model.adapters`."""

    def __init__(self, send: Callable[[EngineInput], None]) -> None:
        self.resident: Mapping[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._send = send
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[AdapterReply]] = {}

    async def load(self, name: str, path: str) -> AdapterReply:
        """Raises RequestError where it is refused, and EngineDiedError."""
        return await self._reply(LoadAdapter(next(self._numbers), name, path))

    async def unload(self, name: str) -> AdapterReply:
        """Wait for the end of its last request; it takes none meanwhile.

        Raises RequestError where it is refused, and EngineDiedError.
        """
        return await self._reply(UnloadAdapter(next(self._numbers), name))

    async def _reply(self, message: LoadAdapter | UnloadAdapter) -> AdapterReply:
        future = asyncio.get_running_loop().create_future()
        self._calls[message.call] = future
        try:
            self._send(message)
            reply: AdapterReply = await future
        finally:
            del self._calls[message.call]
        if reply.refused:
            raise RequestError(
                reply.refused, status=reply.status, code=reply.code, param=reply.param
            )
        return reply

    def take(self, output: AdapterReply | ResidentAdapters) -> None:
        """One whose caller is gone has had its effect all the same."""
        if isinstance(output, ResidentAdapters):
            self.resident = output.adapters
            self.on_change()
        elif (future := self._calls.get(output.call)) is not None and not future.done():
            future.set_result(output)

    def fail(self, error: Exception) -> None:
        """The engine is gone."""
        self.resident = {}
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
