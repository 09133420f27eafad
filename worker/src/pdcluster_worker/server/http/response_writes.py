"""Ways of an answer's bytes to its socket that save calls: the head in one write with the first
bytes of the body, and streamed events past the layers of the application.
"""

import weakref
from asyncio import AbstractEventLoop, Transport
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT_WRITER = "pdcluster.direct_writer"
"""Key in the scope's state of the `DirectWriter` of a request's answer; absent = there is none."""


class ResponseHead:
    """Takes the place of an answer's transport until its head is out: the head waits for what is
    written next, and no longer than to the next step of the event loop.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._held = b""
        cycle.transport = cast(Transport, self)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._held = data
            self._loop.call_soon(self._send)
        else:
            self._send(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _send(self, more: bytes = b"") -> None:
        self._cycle.transport = self._transport
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held + more)


class DirectWriter:
    """Implements `streams.Reader` for parts of a body that are not its last."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # it holds the scope, and the scope's state this

    @property
    def is_open(self) -> bool:
        """True if the answer is in chunks, has begun, and waits for no client."""
        if (cycle := self._cycle()) is None:
            return False
        is_under_way = cycle.response_started and not cycle.response_complete
        can_be_written = not cycle.disconnected and not cycle.flow.write_paused
        return is_under_way and can_be_written and bool(cycle.chunked_encoding)

    def take(self, item: bytes) -> None:
        """Write a part that is not empty, while `is_open`."""
        cycle = self._cycle()
        assert cycle is not None, "a writer that is open has an answer"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(item), item))
