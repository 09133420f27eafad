"""A connection whose client has ended its sending side: it waits for its answer, or has gone.  An
interim response tells them apart: one that has gone resets the connection.  HTTP/1.0, which
proxies that end an abandoned request speak, knows none: such a client is waited for shortly.
"""

import asyncio
import socket
from collections.abc import Callable

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

_FIRST_SECONDS = 0.1
_MAX_SECONDS = 10.0
_UNKNOWN_SECONDS = 10.0
"""Time for the first byte of an answer to a client that may have gone."""


class HalfClosed:
    """is_begun: a part of the answer is out, after which no interim response may come."""

    def __init__(
        self, transport: asyncio.Transport, is_begun: Callable[[], bool], *, takes_interim: bool
    ) -> None:
        self._transport = transport
        self._is_begun = is_begun
        self._takes_interim = takes_interim
        self._seconds = 0.0
        self._poll_after(_FIRST_SECONDS)

    def _poll_after(self, seconds: float) -> None:
        self._check = asyncio.get_running_loop().call_later(seconds, self._poll, seconds)

    def _poll(self, seconds: float) -> None:
        """Abort what was reset since the last interim response, or send another one."""
        if self._transport.is_closing():
            return
        self._seconds += seconds
        connection: socket.socket = self._transport.get_extra_info("socket")
        is_unknown = not self._takes_interim and self._seconds > _UNKNOWN_SECONDS
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or (
            is_unknown and not self._is_begun()
        ):
            self._transport.abort()
            return
        if self._takes_interim and not self._is_begun():
            self._transport.write(INTERIM)
        self._poll_after(min(2 * seconds, _MAX_SECONDS))

    def stop(self) -> None:
        self._check.cancel()
