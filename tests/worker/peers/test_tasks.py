"""Parts that stand and fall together lose neither an error nor a cancellation."""

import asyncio

import pytest

from pdcluster_worker.backoff import run_until_first_ends


class Part:
    """Waits until it is made to fail, or is cancelled; `linger` delays its end."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.linger = asyncio.Event()
        self.linger.set()
        self.ended = False

    async def run(self) -> None:
        try:
            await self.told.wait()
            raise ValueError("on demand")
        finally:
            await self.linger.wait()
            self.ended = True


async def test_error_of_a_part_comes_out_as_it_is_and_ends_the_others() -> None:
    parts = [Part(), Part()]
    parts[1].told.set()

    with pytest.raises(ValueError, match="on demand"):
        await run_until_first_ends(*(part.run() for part in parts))
    assert parts[0].ended


async def test_error_leaves_the_task_uncancelled() -> None:
    part = Part()
    part.told.set()

    with pytest.raises(ValueError, match="on demand"):
        await run_until_first_ends(part.run())
    assert asyncio.current_task().cancelling() == 0


async def test_cancellation_while_a_part_fails_is_not_lost() -> None:
    failing, lingering = Part(), Part()
    lingering.linger.clear()
    failing.told.set()
    task = asyncio.create_task(run_until_first_ends(failing.run(), lingering.run()))
    while not failing.ended:
        await asyncio.sleep(0)

    task.cancel()
    lingering.linger.set()

    with pytest.raises(asyncio.CancelledError):
        await task
