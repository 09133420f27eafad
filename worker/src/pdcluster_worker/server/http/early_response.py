"""Answers a request whose body is not needed, without waiting for it.

The client has its whole answer at once, and that the connection ends with it.
Then what the client still sends is dropped for a while (`limits.HttpLimits`),
so that it can read the answer before the connection closes; sooner where a
new connection needs the place (`open_connections`).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_worker.server.http.limits import HttpLimits

ANSWERED = "pdcluster.answered"
"""Key in the scope's state of the function to call once the client has its whole answer; absent =
none.
"""


def announced_bytes(scope: Scope) -> int | None:
    """Length of the body by its header; 0 for none, None when only its end shows it."""
    length = 0
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":  # digits only: the parser has seen to that
            length = int(value)
    return length


async def answer(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    limits: HttpLimits,
) -> None:
    """Let `app`, which must not need the body, answer.

    Returns when the client has stopped sending, or was given up.
    """
    if announced_bytes(scope) == 0:
        await app(scope, receive, send)
        return

    async def send_before_the_body(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        _note_answered(scope)
        await _drop(receive, limits)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await app(scope, _nothing, send_before_the_body)


def _note_answered(scope: Scope) -> None:
    answered: Callable[[], None] | None = scope.get("state", {}).get(ANSWERED)
    if answered is not None:
        answered()


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _drop(receive: Receive, limits: HttpLimits) -> None:
    remaining = limits.linger_bytes
    with suppress(TimeoutError):
        async with asyncio.timeout(limits.linger_seconds):
            while remaining > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                remaining -= len(message.get("body", b""))
