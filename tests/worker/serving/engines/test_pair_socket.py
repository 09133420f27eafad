"""The server's end of the ZMQ pair against a real other end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from pdcluster_worker.serving.engines.child import PairSocket


class Ends:
    """Ours, and an engine's that may connect."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self.ours = PairSocket(context, address)
        self.theirs = context.socket(zmq.PAIR)
        self.theirs.set_hwm(0)
        self._address = address
        self.ours.bind()

    def connect(self) -> zmq.Socket:
        self.theirs.connect(self._address)
        return self.theirs


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    context = zmq.Context(io_threads=1)
    ends = Ends(context, f"ipc://{tmp_path}/engine")
    yield ends
    ends.ours.close()
    ends.ours.close()  # as after an error on the way
    ends.theirs.close(linger=0)
    context.term()


async def test_frames_go_both_ways_in_order_however_many_come_at_once(ends):
    ours = ends.ours
    theirs = ends.connect()
    frames = [b"%d" % number for number in range(500)]
    for frame in frames:
        theirs.send(frame)
        await ours.send(frame)  # a call of ours must not lose the signal of what has come
    async with asyncio.timeout(20):
        assert [await ours.recv() for _ in frames] == frames
    assert [theirs.recv() for _ in frames] == frames


async def test_a_waiting_receiver_gets_a_frame_that_comes_later(ends):
    ours = ends.ours
    theirs = ends.connect()
    for number in range(3):
        waiting = asyncio.create_task(ours.recv())
        await asyncio.sleep(0)
        theirs.send(b"%d" % number)
        async with asyncio.timeout(20):
            assert await waiting == b"%d" % number


async def test_what_is_sent_before_the_engine_connects_waits_for_it(ends):
    ours = ends.ours
    sending = asyncio.create_task(ours.send(b"first"))
    await asyncio.sleep(0)
    assert not sending.done()
    theirs = ends.connect()
    async with asyncio.timeout(20):
        await sending
    assert theirs.recv() == b"first"


async def test_a_cancelled_receiver_loses_no_frame(ends):
    ours = ends.ours
    theirs = ends.connect()
    waiting = asyncio.create_task(ours.recv())
    await asyncio.sleep(0)
    waiting.cancel()
    theirs.send(b"kept")
    async with asyncio.timeout(20):
        assert await ours.recv() == b"kept"
