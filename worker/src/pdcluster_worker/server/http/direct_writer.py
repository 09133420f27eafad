"""Way of streamed events to their socket by a call, past the layers of the application, which have
done their part with the answer's head: a third of what a token costs the server.
"""

import weakref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

DIRECT_WRITER = "pdcluster.direct_writer"
"""Key in the scope's state of the `DirectWriter` of a request's answer; absent = there is none."""


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
        cycle = self._cycle()
        assert cycle is not None, "a writer that is open has an answer"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(item), item))
