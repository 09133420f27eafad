"""The end of a client that stops reading, on a clock and a transport that the test moves; on real
sockets it is in test_disconnect.
"""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from pdcluster_worker.server.http.connection import SEND_SECONDS, HttpConnection

KEEP_ALIVE_SECONDS = 75


class Timer:
    def __init__(self, callback, args):
        self.run = lambda: callback(*args)
        self.cancelled = False

    def cancel(self):
        self.cancelled = True


class Clock:
    """A loop's call_later; `pass_time` runs what is due."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay, callback, *args):
        timer = Timer(callback, args)
        if delay != KEEP_ALIVE_SECONDS:
            assert delay == SEND_SECONDS
            self.timers.append(timer)
        return timer

    @property
    def waiting(self):
        return [timer for timer in self.timers if not timer.cancelled]

    def pass_time(self):
        due, self.timers = self.waiting, []
        for timer in due:
            timer.run()


class Transport(asyncio.Transport):
    """Holds `unsent` bytes; its own socket, whose client is `peer`, None when it has gone."""

    unsent = 0
    aborted = False
    limits = None
    peer = None

    def get_extra_info(self, name, default=None):
        return self if name == "socket" else default

    def getsockname(self):
        return "10.244.1.10", 8000

    def getpeername(self):
        if self.peer is None:
            raise OSError(107, "Transport endpoint is not connected")
        return self.peer

    def set_write_buffer_limits(self, high=None, low=None):
        self.limits = (high, low)

    def get_write_buffer_size(self):
        return self.unsent

    def abort(self):
        self.aborted = True

    def close(self):
        pass


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def connection(clock, transport):
    async def app(scope, receive, send):
        """Never called."""

    config = uvicorn.Config(app, ws="none", log_config=None, timeout_keep_alive=KEEP_ALIVE_SECONDS)
    connection = HttpConnection(config, ServerState(), {}, clock)
    connection.connection_made(transport)
    assert transport.limits == (0, None)
    return connection


def test_a_client_that_reads_a_little_in_every_bound_is_kept(connection, clock, transport):
    transport.unsent = 1000
    connection.pause_writing()
    for _ in range(50):
        transport.unsent -= 1
        clock.pass_time()

    assert not transport.aborted


def test_a_client_that_reads_nothing_for_one_bound_is_cut_off(connection, clock, transport, caplog):
    transport.unsent = 1000
    connection.pause_writing()
    transport.unsent = 900
    clock.pass_time()
    assert not transport.aborted
    clock.pass_time()

    assert transport.aborted
    assert "client stopped reading, connection aborted client=None unsent_bytes=900" in caplog.text


@pytest.mark.parametrize(
    "end",
    [
        lambda connection: connection.resume_writing(),
        lambda connection: connection.connection_lost(None),
    ],
)
def test_nothing_is_watched_once_all_is_sent_or_the_client_is_gone(
    connection, clock, transport, end
):
    transport.unsent = 1000
    connection.pause_writing()
    assert len(clock.waiting) == 1
    end(connection)

    assert clock.waiting == []


def test_a_client_that_was_gone_before_its_request_has_no_name(connection, transport):
    assert connection.addresses is None
    transport.peer = ("10.244.1.11", 49153)
    connection.connection_made(transport)

    assert connection.addresses == (("10.244.1.10", 8000), transport.peer)
