"""Long work in slices, between which the other tasks of the loop have their turns.

Of a large PDCluster to unpack, to render and to compare the children takes seconds in all, in which
probes, watches and other PDClusters must not wait.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

SLICE_SECONDS = 0.05
"""A slice ends with the first item after this time: one takes up to as much again."""


async def in_slices(
    items: Iterable[Item], clock: Callable[[], float] = time.perf_counter
) -> list[Item]:
    """All items of an iterable that makes each when it is asked for."""
    made: list[Item] = []
    began = clock()
    for item in items:
        made.append(item)
        if clock() - began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            began = clock()
    return made
