"""Slices of long work: how often the others have their turn."""

import asyncio
from collections.abc import Iterator

import pytest

from pdcluster_operator.reconcile.observation import SLICE_SECONDS, in_slices


class ItemClock:
    """A clock that goes on with each item."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def items(self, number: int) -> Iterator[int]:
        for each in range(number):
            self.now += self._seconds
            yield each

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "turns"),
    [(SLICE_SECONDS / 100, 0), (0.75 * SLICE_SECONDS, 5), (2 * SLICE_SECONDS, 10)],
    ids=["short work", "some items a slice", "long items"],
)
async def test_others_have_a_turn_after_each_slice(seconds: float, turns: int):
    clock, seen = ItemClock(seconds), list[float]()

    async def other() -> None:
        while True:
            seen.append(clock.now)
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    assert await in_slices(clock.items(10), clock) == list(range(10))
    beside.cancel()
    assert len(seen) == turns
