"""Frames of a stream: what is put at one moment is one message, and a slow reader makes makers
wait.
"""

import asyncio
from typing import Any

from msgspec.msgpack import decode

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import CancelCall, decode_requests
from pdcluster_worker.peers.batched_writer import FRAME_BYTES, FULL, MAX_ITEM_BYTES, BatchedWriter


def none_left_out(item: Any, error: RequestError) -> None:
    raise AssertionError(f"an item was left out: {error}")


class Line:
    """Takes frames, each only when it is let."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []
        self.may_take = asyncio.Event()
        self.may_take.set()

    async def write(self, frame: bytes) -> None:
        await self.may_take.wait()
        self.frames.append(decode_requests(frame))


async def test_items_of_one_moment_are_one_frame_in_order() -> None:
    line = Line()
    out = BatchedWriter(line.write, none_left_out)
    running = asyncio.create_task(out.run())
    for number in range(3):
        out.put(CancelCall(number))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    out.put(CancelCall(3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert line.frames == [[CancelCall(0), CancelCall(1), CancelCall(2)], [CancelCall(3)]]
    running.cancel()


async def test_a_frame_ends_where_it_is_large() -> None:
    sizes: list[int] = []

    async def write(frame: bytes) -> None:
        sizes.append(len(decode(frame)))

    out = BatchedWriter(write, none_left_out)
    running = asyncio.create_task(out.run())
    for _ in range(5):
        out.put(bytes(FRAME_BYTES // 2))
    while sum(sizes) < 5:
        await asyncio.sleep(0)

    assert sizes == [2, 2, 1]
    running.cancel()


async def test_what_waits_for_a_slow_reader_is_bounded() -> None:
    line = Line()
    line.may_take.clear()
    out = BatchedWriter(line.write, none_left_out)
    running = asyncio.create_task(out.run())
    for number in range(FULL):
        out.put(CancelCall(number))
    assert out.is_full
    waiting = asyncio.create_task(out.wait_until_writable())
    await asyncio.sleep(0)
    assert not waiting.done()

    line.may_take.set()
    await waiting

    assert not out.is_full
    running.cancel()


async def test_what_was_put_has_been_written_after_the_wait() -> None:
    line = Line()
    line.may_take.clear()
    out = BatchedWriter(line.write, none_left_out)
    running = asyncio.create_task(out.run())
    out.put(CancelCall(1))
    waiting = asyncio.create_task(out.written())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    out.put(CancelCall(2))
    assert not waiting.done()

    line.may_take.set()
    await waiting

    assert line.frames[0] == [CancelCall(1)]
    await out.written()
    assert line.frames[1:] == [[CancelCall(2)]]
    running.cancel()


async def test_an_item_too_long_for_a_message_is_left_out_and_the_others_go() -> None:
    sizes: list[list[int]] = []
    left: list[str] = []

    async def write(frame: bytes) -> None:
        sizes.append([len(item) for item in decode(frame)])

    def left_out(item: bytes, error: RequestError) -> bytes | None:
        left.append(str(error))
        return b"instead" if len(left) == 2 else None

    out = BatchedWriter(write, left_out)
    running = asyncio.create_task(out.run())
    long = bytes(MAX_ITEM_BYTES)  # and the bytes that say how long it is
    for item in (b"1", long, b"2"):
        out.put(item)
    await out.written()
    out.put(long)
    await out.written()

    assert sizes == [[1, 1], [7]]
    assert len(left) == 2
    assert f"may take {MAX_ITEM_BYTES}" in left[0]
    running.cancel()
