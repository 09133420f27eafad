"""The queue runner on a running loop; they meet at events, never at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator.queue.work_queue import Done, QueueRunner, WorkQueue
from pdcluster_schema.backoff import Backoff

A, B, C = (Key("default", name) for name in "abc")


class Rig:
    """A runner whose work lets a test see when it begins and decide when it ends."""

    task: asyncio.Task[None]

    def __init__(self, most: int, waits_seconds: float) -> None:
        self.num_errors = self.num_begun = self.num_ended = 0
        self.begun: asyncio.Queue[Key] = asyncio.Queue()
        self._ends: asyncio.Queue[Done | Exception] = asyncio.Queue()
        queue: WorkQueue[Key] = WorkQueue(Backoff(first=0.01, most=0.01))
        self.runner = QueueRunner(
            self._work, self._on_error, most, queue=queue, waits_seconds=waits_seconds
        )

    async def _work(self, key: Key) -> Done:
        self.num_begun += 1
        await self.begun.put(key)
        end = await self._ends.get()
        if isinstance(end, Exception):
            raise end
        return end

    def _on_error(self) -> None:
        self.num_errors += 1

    def add(self, *keys: Key) -> None:
        for key in keys:
            self.runner.add(key)

    async def begin(self, number: int = 1) -> list[Key]:
        """The next keys whose work begins."""
        return [await self.begun.get() for _ in range(number)]

    def end(self, end: Done | Exception | None = None) -> None:
        self.num_ended += 1
        self._ends.put_nowait(end or Done())

    async def assert_one_waits(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        assert (self.begun.empty(), self.runner.queue.depth) == (True, 1)


@asynccontextmanager
async def running(most: int, *keys: Key, waits_seconds: float = 0.0) -> AsyncIterator[Rig]:
    """A runner with these keys; what is in work at the end of the block ends well."""
    rig = Rig(most, waits_seconds)
    rig.task = asyncio.create_task(rig.runner.run())
    rig.add(*keys)
    async with asyncio.timeout(10):
        yield rig
        for _ in range(rig.num_begun - rig.num_ended):
            rig.end()
        rig.runner.stop()
        await rig.task


async def test_no_more_keys_are_in_work_than_the_bound():
    async with running(2, A, B, C) as rig:
        assert await rig.begin(2) == [A, B]
        assert rig.runner.queue.depth == 1
        rig.end()
        assert await rig.begin() == [C]


@pytest.mark.parametrize(
    ("end", "num_errors"),
    [
        (RuntimeError("broken"), 1),
        (Done(try_again=True), 0),
        (Done(requeue_after_seconds=0.01), 0),
    ],
    ids=["error", "refused", "at its own time"],
)
async def test_work_comes_again_and_errors_alone_are_counted(end, num_errors, caplog):
    async with running(1, A) as rig:
        await rig.begin()
        rig.end(end)
        assert await rig.begin() == [A]
    assert rig.num_errors == num_errors
    assert ("default/a" in caplog.text) is bool(num_errors)


async def test_stop_lets_the_work_in_hand_end_and_takes_nothing_more():
    async with running(1, A, B) as rig:
        await rig.begin()
        rig.runner.stop()
        assert not rig.task.done()
    assert (rig.num_begun, rig.runner.queue.depth) == (1, 1)


async def test_two_are_in_work_and_a_third_waits_for_the_end_of_one():
    async with running(4, A, B, C, waits_seconds=3600.0) as rig:
        assert await rig.begin(2) == [A, B]
        await rig.assert_one_waits()
        rig.end()
        assert await rig.begin() == [C]


async def test_nothing_is_begun_while_work_holds_the_gate_closed():
    async with running(4, waits_seconds=3600.0) as rig:
        with rig.runner.gate.closed():
            rig.add(A, B)
            assert await rig.begin() == [A]
            await rig.assert_one_waits()
        assert await rig.begin() == [B]


async def test_work_that_waits_is_no_hindrance_though_it_closes_the_gate():
    async with running(4, waits_seconds=0.01) as rig:
        with rig.runner.gate.closed():
            rig.add(A, B, C)
            assert await rig.begin(3) == [A, B, C]


async def test_a_key_that_comes_while_the_runner_sleeps_is_begun_while_other_work_waits():
    async with running(4, waits_seconds=0.2) as rig:
        with rig.runner.gate.closed():
            rig.add(A)
            assert await rig.begin() == [A]
            await asyncio.sleep(0.05)  # so that it sleeps without anything due
            rig.add(B)
            assert await rig.begin() == [B]


async def test_a_key_that_is_due_by_its_time_waits_for_the_end_of_work_too():
    async with running(1, A) as rig:
        await rig.begin()
        rig.runner.queue.add_at(B, 0.0)
        rig.end()
        assert await rig.begin() == [B]


async def test_work_in_hand_is_cancelled_with_the_runner():
    rig = Rig(2, waits_seconds=0.0)
    task = asyncio.create_task(rig.runner.run())
    rig.add(A)
    async with asyncio.timeout(10):
        await rig.begin()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not [each for each in asyncio.all_tasks() if "work on" in each.get_name()]


async def test_work_that_never_waits_leaves_turns_to_everything_else():
    turns_before: list[int] = []
    turns = 0

    async def work(key: Key) -> Done:
        turns_before.append(turns)
        if len(turns_before) == 100:
            runner.stop()
        return Done()

    runner = QueueRunner(work, lambda: None, 1)
    for number in range(100):
        runner.add(Key("default", f"chat-{number}"))
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(10):
        while not task.done():
            turns += 1
            await asyncio.sleep(0)

    assert turns_before == sorted(set(turns_before))  # at least one turn between any two
