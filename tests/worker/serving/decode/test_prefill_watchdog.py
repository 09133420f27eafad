"""Waits for a prefill worker: their length, and their end."""

import asyncio

import pytest
from msgspec.structs import replace

from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.serving.engines.stall_watch import NoProgressError, PrefillWatchdog, watch
from tests.worker.fake_clock import FakeClock

MARGIN = 4.0


class Waiting:
    """A wait for a prefill worker whose reports the test writes."""

    def __init__(self, load: WorkerLoad) -> None:
        self.load = load
        self.clock = FakeClock()
        self.watchdog = PrefillWatchdog(self.clock, lambda: self.load)

    def seconds(self, count: int) -> int:
        """Count of so many seconds for which it is patient."""
        for passed in range(count):
            self.clock.advance(1.0)
            try:
                self.watchdog.check(MARGIN)
            except NoProgressError:
                return passed
        return count


def test_patience_ends_after_one_and_a_half_margins_without_progress():
    assert Waiting(WorkerLoad(progress=7)).seconds(60) == 6


def test_patience_is_longer_by_the_longest_step_of_that_engine():
    assert Waiting(WorkerLoad(progress=7, longest_step_seconds=10.0)).seconds(60) == 16


def test_patience_lasts_while_that_engine_makes_any_progress():
    """A long queue there: steps for others count."""
    waiting = Waiting(WorkerLoad())
    for progress in range(100):
        waiting.load = replace(waiting.load, progress=progress)
        assert waiting.seconds(3) == 3


def test_patience_is_not_renewed_by_reports_without_progress():
    waiting = Waiting(WorkerLoad(progress=7))
    assert waiting.seconds(2) == 2
    waiting.load = replace(waiting.load, num_running=1, num_waiting=5)

    assert waiting.seconds(60) == 4


def test_patience_does_not_count_a_sleep_of_the_machine():
    waiting = Waiting(WorkerLoad())
    waiting.clock.advance(3600.0)

    assert waiting.seconds(60) == 5  # the first look counts two, the others one each


async def test_checked_ends_the_block_with_what_the_check_raises():
    looks: list[int] = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise NoProgressError("too long")

    with pytest.raises(NoProgressError, match="too long"):
        async with asyncio.timeout(5), watch(check, lambda: 0.0):
            await asyncio.Event().wait()
    await asyncio.sleep(0)
    assert len(looks) == 3


async def test_checked_looks_no_more_after_the_block():
    looks: list[int] = []
    async with watch(lambda: looks.append(1), lambda: 0.0):
        while not looks:
            await asyncio.sleep(0)
    seen = len(looks)
    for _ in range(10):
        await asyncio.sleep(0)

    assert len(looks) == seen


async def test_checked_lets_errors_and_cancellations_of_the_block_through():
    with pytest.raises(TimeoutError, match="own"):
        async with watch(lambda: None, lambda: 1.0):
            raise TimeoutError("its own")

    async def wait() -> None:
        async with watch(lambda: None, lambda: 1.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
