"""Several streams as one; what `Choices` and races make of it is tested there."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pdcluster_worker.streams import Mapped, Merged


async def numbers(
    *values: int, closed: list[int], gate: asyncio.Event | None = None
) -> AsyncGenerator[int, None]:
    try:
        for value in values:
            yield value
        if gate is not None:
            await gate.wait()
    finally:
        closed.append(values[0])


async def test_items_of_each_stream_keep_their_order_and_the_end_comes_once() -> None:
    closed: list[int] = []
    merged = Merged([numbers(1, 2, 3, closed=closed), numbers(11, 12, closed=closed)])
    found = [item async for item in merged]

    assert ([item for item in found if item < 10], [item for item in found if item > 10]) == (
        [1, 2, 3],
        [11, 12],
    )
    assert await anext(merged, None) is None
    assert sorted(closed) == [1, 11]


async def test_closing_closes_every_stream_and_nothing_comes_after_it() -> None:
    closed: list[int] = []
    gate = asyncio.Event()
    async with aclosing(
        Merged([numbers(1, closed=closed, gate=gate), numbers(2, closed=closed, gate=gate)])
    ) as merged:
        assert {await anext(merged), await anext(merged)} == {1, 2}

    assert sorted(closed) == [1, 2]
    assert await anext(merged, None) is None


async def test_one_stream_can_be_ended_while_others_go_on() -> None:
    closed: list[int] = []
    merged = Merged([numbers(1, closed=closed, gate=asyncio.Event()), numbers(2, 3, closed=closed)])
    assert {await anext(merged), await anext(merged)} == {1, 2}
    merged.end(0)

    assert [item async for item in merged] == [3]
    assert sorted(closed) == [1, 2]


class Collecting:
    """A reader that keeps what it takes."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []

    def take(self, item: str) -> None:
        self.taken.append(item)


def test_mapped_readers_in_a_row_drop_what_one_makes_nothing_of() -> None:
    end = Collecting()
    reader = Mapped(lambda number: number + 1 if number else None, Mapped(str, end))
    for number in (1, 0, 2):
        reader.take(number)
    assert end.taken == ["2", "3"]


def test_mapped_reader_is_open_while_its_last_one_is() -> None:
    end = Collecting()
    reader = Mapped(int, Mapped(str, end))
    assert reader.is_open
    end.is_open = False
    assert not reader.is_open
