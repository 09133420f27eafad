"""One HTTP connection's way out, with an end for a client that stops reading.

A handler that writes to a client that reads nothing would wait without end, with its
request open and a drain behind it.  Here no progress for SEND_SECONDS aborts
the connection, which the application sees as a client that has gone.  A slow
client that goes on reading is never cut off.
"""

import asyncio
import logging

from pdcluster_worker.server.http import unacked_responses
from pdcluster_worker.server.http.direct_write import DIRECT_WRITER, DirectWriter
from pdcluster_worker.server.http.http_protocol import HttpProtocol
from pdcluster_worker.server.http.response_head import ResponseHead

logger = logging.getLogger(__name__)

SEND_SECONDS = 30.0


class HttpConnection(HttpProtocol):
    """Watches what is still to be sent whenever the socket takes no more."""

    send_seconds = SEND_SECONDS
    _check: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        """True if a request has come whole and its answer has not gone whole to the kernel."""
        if self.pipeline or self.transport.get_write_buffer_size():
            return True
        cycle = self.cycle  # of the last request that has begun to come; None before the first
        return bool(cycle and not cycle.more_body and not cycle.response_complete)

    @property
    def name(self) -> str | None:
        """As the kernel's tables have it; None for a client that was gone before it asked."""
        if self.server is None or self.client is None:
            return None
        host, port = self.server
        return unacked_responses.name((host, port or 0), self.client)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Let writers wait while anything is unsent: so what is unsent only shrinks, and shrinks
        when the client reads.
        """
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def on_headers_complete(self) -> None:
        """A request; what answers a POST goes out in as few writes as may be."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.scope["method"] == "POST":
            ResponseHead(self.cycle, self.loop)
            self.scope["state"][DIRECT_WRITER] = DirectWriter(self.cycle)

    def pause_writing(self) -> None:
        """The socket takes no more: look again in send_seconds."""
        super().pause_writing()
        self._poll_later()

    def resume_writing(self) -> None:
        """All is sent."""
        self._stop_polling()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left to watch."""
        self._stop_polling()
        super().connection_lost(exc)

    def _poll_later(self) -> None:
        self._check = self.loop.call_later(
            self.send_seconds, self._poll, self.transport.get_write_buffer_size()
        )

    def _poll(self, unsent_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._poll_later()
            return
        logger.warning(
            "client stopped reading, connection aborted client=%s unsent_bytes=%d",
            self.client,
            unsent_bytes,
        )
        self.transport.abort()

    def _stop_polling(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None
