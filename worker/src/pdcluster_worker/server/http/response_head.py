"""The head of an answer in one write with the first bytes of its body: one call to the kernel
instead of two.

uvicorn writes the head as soon as the application gives it, and this server has
all writes go out at once (`connection`).  Here the head waits for what is written
next, and no longer than to the next step of the event loop.
"""

from asyncio import AbstractEventLoop, Transport
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class ResponseHead:
    """Takes the place of an answer's transport until its head is out."""

    def __init__(self, cycle: RequestResponseCycle, loop: AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._held = b""
        cycle.transport = cast(Transport, self)

    def write(self, data: bytes) -> None:
        """Hold the first bytes, and send them before the second."""
        if not self._held:
            self._held = data
            self._loop.call_soon(self._send)
        else:
            self._send(data)

    def close(self) -> None:
        """Close when all is sent."""
        self._send()
        self._transport.close()

    def is_closing(self) -> bool:
        """True if nothing more is sent."""
        return self._transport.is_closing()

    def _send(self, more: bytes = b"") -> None:
        self._cycle.transport = self._transport
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held + more)
