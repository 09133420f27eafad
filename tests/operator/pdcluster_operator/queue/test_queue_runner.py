"""The queue runner on a running loop; they meet at events, never at a time."""

import asyncio

import pytest

from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator.queue.runner import Done, QueueRunner
from pdcluster_operator.queue.work_queue import WorkQueue
from pdcluster_schema.backoff import Backoff

A, B, C = (Key("default", name) for name in "abc")


class Recorder:
    """Work that lets a test see when it starts and decide when it ends."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[Key] = asyncio.Queue()
        self.ends: asyncio.Queue[Done | Exception] = asyncio.Queue()
        self.num_errors = 0

    async def work(self, key: Key) -> Done:
        await self.started.put(key)
        end = await self.ends.get()
        if isinstance(end, Exception):
            raise end
        return end

    def on_error(self) -> None:
        self.num_errors += 1


def start(
    recorder: Recorder, most: int, waits_seconds: float = 0.0
) -> tuple[QueueRunner, asyncio.Task[None]]:
    queue: WorkQueue[Key] = WorkQueue(Backoff(first=0.01, most=0.01))
    runner = QueueRunner(
        recorder.work, recorder.on_error, most, queue=queue, waits_seconds=waits_seconds
    )
    return runner, asyncio.create_task(runner.run())


async def finish(runner: QueueRunner, task: asyncio.Task[None]) -> None:
    runner.stop()
    async with asyncio.timeout(10):
        await task


async def test_no_more_keys_are_in_work_than_the_bound():
    recorder = Recorder()
    runner, task = start(recorder, 2)
    for key in (A, B, C):
        runner.add(key)
    async with asyncio.timeout(10):
        assert [await recorder.started.get(), await recorder.started.get()] == [A, B]
        assert runner.queue.depth == 1
        await recorder.ends.put(Done())
        assert await recorder.started.get() == C
    for _ in range(2):
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_work_that_raises_is_counted_and_tried_again_and_ends_nothing_else(caplog):
    recorder = Recorder()
    runner, task = start(recorder, 1)
    runner.add(A)
    async with asyncio.timeout(10):
        await recorder.started.get()
        await recorder.ends.put(RuntimeError("broken"))
        assert await recorder.started.get() == A  # after the back-off
    assert recorder.num_errors == 1
    assert "default/a" in caplog.text
    await recorder.ends.put(Done())
    await finish(runner, task)


async def test_work_that_was_refused_comes_back_without_counting_as_an_error():
    recorder = Recorder()
    runner, task = start(recorder, 1)
    runner.add(A)
    async with asyncio.timeout(10):
        await recorder.started.get()
        await recorder.ends.put(Done(try_again=True))
        assert await recorder.started.get() == A
    assert recorder.num_errors == 0
    await recorder.ends.put(Done())
    await finish(runner, task)


async def test_a_key_is_due_again_at_its_own_time():
    recorder = Recorder()
    runner, task = start(recorder, 1)
    runner.add(A)
    async with asyncio.timeout(10):
        await recorder.started.get()
        await recorder.ends.put(Done(requeue_after_seconds=0.01))
        assert await recorder.started.get() == A
    await recorder.ends.put(Done())
    await finish(runner, task)


async def test_stop_lets_the_work_in_hand_end_and_takes_nothing_more():
    recorder = Recorder()
    runner, task = start(recorder, 1)
    runner.add(A)
    runner.add(B)
    async with asyncio.timeout(10):
        await recorder.started.get()
    runner.stop()
    assert not task.done()
    await recorder.ends.put(Done())
    await finish(runner, task)
    assert recorder.started.empty()
    assert runner.queue.depth == 1


async def test_two_are_in_work_and_a_third_waits_for_the_end_of_one():
    recorder = Recorder()
    runner, task = start(recorder, 4, waits_seconds=3600.0)
    for key in (A, B, C):
        runner.add(key)
    async with asyncio.timeout(10):
        assert [await recorder.started.get(), await recorder.started.get()] == [A, B]
        for _ in range(10):
            await asyncio.sleep(0)
        assert (recorder.started.empty(), runner.queue.depth) == (True, 1)
        await recorder.ends.put(Done())
        assert await recorder.started.get() == C
    for _ in range(2):
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_nothing_is_begun_while_work_holds_the_gate_closed():
    recorder = Recorder()
    runner, task = start(recorder, 4, waits_seconds=3600.0)
    async with asyncio.timeout(10):
        with runner.gate.closed():
            for key in (A, B):
                runner.add(key)
            assert await recorder.started.get() == A
            for _ in range(10):
                await asyncio.sleep(0)
            assert (recorder.started.empty(), runner.queue.depth) == (True, 1)
        assert await recorder.started.get() == B
    for _ in range(2):
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_work_that_waits_is_no_hindrance_though_it_closes_the_gate():
    recorder = Recorder()
    runner, task = start(recorder, 4, waits_seconds=0.01)
    async with asyncio.timeout(10):
        with runner.gate.closed():
            for key in (A, B, C):
                runner.add(key)
            assert [await recorder.started.get() for _ in range(3)] == [A, B, C]
    for _ in range(3):
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_a_key_that_comes_while_the_runner_sleeps_is_begun_while_other_work_waits():
    recorder = Recorder()
    runner, task = start(recorder, 4, waits_seconds=0.2)
    async with asyncio.timeout(10):
        with runner.gate.closed():
            runner.add(A)
            assert await recorder.started.get() == A
            await asyncio.sleep(0.05)  # so that it sleeps without anything due
            runner.add(B)
            assert await recorder.started.get() == B
    for _ in range(2):
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_more_is_begun_while_other_work_waits():
    recorder = Recorder()
    runner, task = start(recorder, 3, waits_seconds=0.01)
    for key in (A, B, C):
        runner.add(key)
    async with asyncio.timeout(10):
        assert [await recorder.started.get() for _ in range(3)] == [A, B, C]
    for _ in range(3):
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_a_key_that_is_due_by_its_time_waits_for_the_end_of_work_too():
    recorder = Recorder()
    runner, task = start(recorder, 1)
    runner.add(A)
    async with asyncio.timeout(10):
        await recorder.started.get()
        runner.queue.add_at(B, 0.0)
        await recorder.ends.put(Done())
        assert await recorder.started.get() == B
        await recorder.ends.put(Done())
    await finish(runner, task)


async def test_work_in_hand_is_cancelled_with_the_runner():
    recorder = Recorder()
    runner, task = start(recorder, 2)
    runner.add(A)
    async with asyncio.timeout(10):
        await recorder.started.get()
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
