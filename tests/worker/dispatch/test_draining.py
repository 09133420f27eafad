"""When a worker is ready, draining and drained, on a counter of what holds it."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.dispatch import draining
from pdcluster_worker.dispatch.draining import Drain
from pdcluster_worker.peers.records import WorkerState

DEADLINE_SECONDS = 5


class Holder:
    """Something that holds a drain, and the states that were announced."""

    def __init__(self) -> None:
        self.count = 0
        self.states: list[WorkerState] = []
        self.drain = Drain(lambda: self.count, self.states.append)


@pytest.fixture
async def holder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Holder]:
    monkeypatch.setattr(draining, "CHECK_SECONDS", 0.001)
    holder = Holder()
    yield holder
    await holder.drain.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0)


async def test_drain_by_command_ends_drained_when_nothing_holds(holder: Holder) -> None:
    holder.count = 2
    assert holder.drain.num_holding == 0  # nobody waits for them
    holder.drain.command(True)
    assert (holder.states, holder.drain.num_holding) == (["draining"], 2)

    holder.count = 0
    await until(lambda: holder.drain.state == "drained")

    assert holder.states == ["draining", "drained"]


async def test_drain_of_an_idle_worker_is_over_at_once(holder: Holder) -> None:
    holder.drain.command(True)

    assert holder.states == ["drained"]


async def test_drain_that_is_withdrawn_serves_again_from_draining_and_from_drained(holder: Holder) -> None:
    holder.count = 1
    holder.drain.command(True)
    holder.drain.command(False)
    holder.count = 0
    holder.drain.command(True)
    holder.drain.command(False)

    assert holder.states == ["draining", "ready", "drained", "ready"]


async def test_drained_worker_drains_again_while_something_slipped_in(holder: Holder) -> None:
    holder.drain.command(True)
    holder.count = 1
    holder.drain.look()
    holder.count = 0
    await until(lambda: holder.drain.state == "drained")

    assert holder.states == ["drained", "draining", "drained"]


async def test_end_is_not_taken_back_by_a_command(holder: Holder) -> None:
    holder.count = 1
    holder.drain.command(True)
    holder.drain.end()
    holder.drain.command(False)
    assert holder.states == ["draining"]

    holder.count = 0
    async with asyncio.timeout(DEADLINE_SECONDS):
        await holder.drain.drained()

    assert holder.states == ["draining", "drained"]


async def test_command_in_the_end_changes_nothing(holder: Holder) -> None:
    holder.count = 1
    holder.drain.end()
    for present in (True, False, True):
        holder.drain.command(present)

    assert (holder.drain.state, holder.states) == ("draining", ["draining"])


async def test_drained_returns_only_while_nothing_holds(holder: Holder) -> None:
    """Also when something slipped in between the last look and the return."""
    holder.count = 1
    holder.drain.end()
    found: list[int] = []

    async def wait() -> None:
        await holder.drain.drained()
        found.append(holder.count)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    holder.count = 0
    holder.drain.look()  # wakes it up, to run later
    holder.count = 1
    holder.drain.look()
    await asyncio.sleep(0)
    assert not found
    holder.count = 0
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waiting

    assert found == [0]


async def test_drain_looks_again_after_a_quick_change_of_mind(holder: Holder) -> None:
    holder.count = 1
    for present in (True, False, True):
        holder.drain.command(present)
    holder.count = 0
    await until(lambda: holder.drain.state == "drained")

    assert holder.states == ["draining", "ready", "draining", "drained"]


@given(st.lists(st.sampled_from(["drain", "serve", "begin", "end", "look"]), max_size=30))
def test_state_follows_from_the_last_word_and_what_holds(words: list[str]) -> None:
    async def play() -> None:
        holder = Holder()
        wanted = False
        for word in words:
            if word in ("drain", "serve"):
                wanted = word == "drain"
                holder.drain.command(wanted)
            else:
                holder.count = max(0, holder.count + {"begin": 1, "end": -1, "look": 0}[word])
                holder.drain.look()
            assert holder.drain.state == ("ready" if not wanted else "draining" if holder.count else "drained")
            assert holder.drain.num_holding == (holder.count if wanted else 0)
        assert all(one != other for one, other in zip(holder.states, holder.states[1:], strict=False))  # no news is not told
        await holder.drain.close()

    asyncio.run(play())
