"""Pure ASGI: an answer that does not wait for the request's body ends the connection.

The rest of the body is dropped for a while: closing at once would reset the connection, and the
answer might be lost.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_worker.server.http.limits import LimitsNow

ANSWERED = "pdcluster.answered"
"""Key in the scope's state of the function to call once the client has its whole answer; absent =
none.
"""

_TOO_SLOW = 408


def announced_bytes(scope: Scope) -> int | None:
    """Length of the body by its header; 0 for none, None when only its end shows it."""
    length = 0
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":  # digits only: the parser has seen to that
            length = int(value)
    return length


class EarlyResponse:
    def __init__(self, app: ASGIApp, limits: LimitsNow) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or announced_bytes(scope) == 0:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: LimitsNow) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_read = False  # the body, to its end
        self._lingers = True  # a client that was too slow sends nothing that we could wait for

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read = self._is_read or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if self._is_read:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._lingers = message["status"] != _TOO_SLOW
            MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        elif message.get("more_body", False) or not self._lingers:
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            self._note_answered()
            await self._drop()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note_answered(self) -> None:
        answered: Callable[[], None] | None = self._scope.get("state", {}).get(ANSWERED)
        if answered is not None:
            answered()

    async def _drop(self) -> None:
        limits = self._limits()
        remaining = limits.linger_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.linger_seconds):
                while remaining > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    remaining -= len(message.get("body", b""))
