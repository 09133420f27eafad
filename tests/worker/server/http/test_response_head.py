"""The head of an answer goes out with the first bytes of its body, and alone where none follow at
once.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdcluster_worker.server.http.response_writes import ResponseHead


class RecordingTransport:
    """Keeps what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed, "nothing is written to a closed transport"
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
async def cycle(transport: RecordingTransport) -> Any:
    """One answer of uvicorn's, of which its transport counts."""
    cycle = SimpleNamespace(transport=transport)
    ResponseHead(cast(Any, cycle), asyncio.get_running_loop())
    return cycle


async def test_head_and_first_bytes_are_one_write_and_later_ones_are_the_transports_own(
    cycle: Any, transport: RecordingTransport
) -> None:
    cycle.transport.write(b"head ")
    assert transport.written == []
    cycle.transport.write(b"first")
    assert cycle.transport is transport
    cycle.transport.write(b"second")
    await asyncio.sleep(0)

    assert transport.written == [b"head first", b"second"]


async def test_head_that_nothing_follows_is_sent_in_the_next_step(
    cycle: Any, transport: RecordingTransport
) -> None:
    cycle.transport.write(b"head")
    await asyncio.sleep(0)

    assert transport.written == [b"head"]
    assert cycle.transport is transport


async def test_head_is_sent_before_its_connection_closes(
    cycle: Any, transport: RecordingTransport
) -> None:
    cycle.transport.write(b"head")
    assert not cycle.transport.is_closing()
    cycle.transport.close()
    await asyncio.sleep(0)

    assert (transport.written, transport.closed) == ([b"head"], True)
