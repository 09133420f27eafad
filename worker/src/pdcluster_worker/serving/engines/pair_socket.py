"""The server process's end of the ZMQ pair, on the event loop."""

import asyncio
from collections import deque

import zmq


class PairSocket:
    """Implements `client.FrameSocket`; one task receives and one sends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._frames: deque[bytes] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    def bind(self) -> None:
        self._socket.bind(self._address)
        self._loop.add_reader(self._socket.fileno(), self._poll)

    async def recv(self) -> bytes:
        """Wait for one frame."""
        while not self._frames:
            self._arrival = self._loop.create_future()
            await self._arrival
        return self._frames.popleft()

    async def send(self, data: bytes) -> None:
        """Queue one frame; waits only for the engine to connect."""
        while True:
            try:
                self._socket.send(data, zmq.NOBLOCK)
                break
            except zmq.Again:
                self._writable = self._loop.create_future()
                self._poll()
                await self._writable
        # A call may swallow the signal that something has come: the socket's descriptor says it
        # once.
        self._poll()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)

    def _poll(self) -> None:
        while (events := int(self._socket.getsockopt(zmq.EVENTS))) & zmq.POLLIN:
            self._frames.append(self._socket.recv(zmq.NOBLOCK))
        if self._frames:
            _wake(self._arrival)
        if events & zmq.POLLOUT:
            _wake(self._writable)


def _wake(waiting: "asyncio.Future[None] | None") -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
