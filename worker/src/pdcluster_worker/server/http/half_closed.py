"""A connection whose client has ended its sending side: it waits for its answer, or has gone.

TCP says the same of both.  Only an answer to bytes of ours tells them apart, so an interim response
is sent, which every client of HTTP/1.1 ignores: one that has gone resets the connection.  An
answer that comes at once needs none.
"""

import asyncio
import socket
from collections.abc import Callable

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

_FIRST_SECONDS = 0.1
_MAX_SECONDS = 10.0


class HalfClosed:
    """Aborts the connection once its client has gone.

    may_send: whether an interim response may be sent now: no part of the answer has gone out.
    """

    def __init__(self, transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_send = may_send
        self._look_after(_FIRST_SECONDS)

    def _look_after(self, seconds: float) -> None:
        self._check = asyncio.get_running_loop().call_later(seconds, self._look, seconds)

    def _look(self, seconds: float) -> None:
        """Abort what was reset since the last interim response, or send another one."""
        if self._transport.is_closing():
            return
        connection: socket.socket = self._transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        if self._may_send():
            self._transport.write(INTERIM)
        self._look_after(min(2 * seconds, _MAX_SECONDS))

    def stop(self) -> None:
        """The connection has ended."""
        self._check.cancel()
