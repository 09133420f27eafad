"""When a worker is ready, draining and drained, on counters of what holds it and of clients that have not taken all."""

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
    """Something that holds a drain, clients that read slowly, and the states that were announced.

    answering: cleared, an answer to how many clients there are is on the way until it is set.
    """

    def __init__(self) -> None:
        self.count = 0
        self.num_unsent = 0
        self.num_asked = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.states: list[WorkerState] = []
        self.drain = Drain(lambda: self.count, self.states.append, self._ask)

    async def _ask(self) -> int:
        num_unsent = self.num_unsent
        self.num_asked += 1
        await self.answering.wait()
        return num_unsent

    async def drained(self) -> None:
        await until(lambda: self.drain.state == "drained")


@pytest.fixture
async def holder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Holder]:
    monkeypatch.setattr(draining, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(draining, "UNSENT_CHECK_SECONDS", 0.001)
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
    await holder.drained()

    assert holder.states == ["draining", "drained"]


async def test_drain_of_an_idle_worker_is_over_when_its_clients_were_asked_for(holder: Holder) -> None:
    holder.drain.command(True)
    await holder.drained()

    assert (holder.states, holder.num_asked) == (["draining", "drained"], 1)


async def test_drain_waits_for_clients_that_have_not_taken_all(holder: Holder) -> None:
    holder.num_unsent = 2
    holder.drain.command(True)
    await until(lambda: holder.num_asked >= 3)
    assert (holder.states, holder.drain.num_holding) == (["draining"], 2)

    holder.num_unsent = 0
    await holder.drained()

    assert (holder.states, holder.drain.num_holding) == (["draining", "drained"], 0)


async def test_clients_are_not_asked_for_while_something_else_holds_nor_after_the_drain(holder: Holder) -> None:
    """What a drained worker sends, such as to a scraper, does not make it a draining one."""
    holder.count = 1
    looks = 0

    def count_looks() -> int:
        nonlocal looks
        looks += 1
        return holder.count

    holder.drain._num_holding = count_looks
    holder.drain.command(True)
    await until(lambda: looks >= 10)
    assert holder.num_asked == 0

    holder.count = 0
    await holder.drained()
    holder.num_unsent, looks = 1, 0
    await until(lambda: looks >= 10)

    assert (holder.num_asked, holder.states) == (1, ["draining", "drained"])


@pytest.mark.parametrize("word", ["request", "withdrawn"])
async def test_what_comes_while_clients_are_asked_for_makes_the_answer_void(holder: Holder, word: str) -> None:
    """A request may begin and end meanwhile: its client was not counted."""
    holder.answering.clear()
    holder.drain.command(True)
    await until(lambda: holder.num_asked == 1)
    if word == "request":
        holder.count = 1
        holder.drain.look()
        holder.count = 0
        holder.drain.look()
    else:
        holder.drain.command(False)
        holder.drain.command(True)
    holder.num_unsent = 1
    holder.answering.set()
    await until(lambda: holder.num_asked == 3)

    assert "drained" not in holder.states


async def test_drain_that_is_withdrawn_serves_again_from_draining_and_from_drained(holder: Holder) -> None:
    holder.count = 1
    holder.drain.command(True)
    holder.drain.command(False)
    holder.count = 0
    holder.drain.command(True)
    await holder.drained()
    holder.drain.command(False)

    assert holder.states == ["draining", "ready", "draining", "drained", "ready"]


async def test_drained_worker_drains_again_while_something_slipped_in(holder: Holder) -> None:
    holder.drain.command(True)
    await holder.drained()
    holder.count = 1
    holder.drain.look()
    holder.num_unsent = 1
    holder.count = 0
    await until(lambda: holder.num_asked >= 3)
    assert holder.drain.state == "draining"  # for its client, too
    holder.num_unsent = 0
    await holder.drained()

    assert holder.states == ["draining", "drained", "draining", "drained"]


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
    found: list[int] = []

    def slip_in(state: WorkerState) -> None:
        if state == "drained" and state not in holder.states:
            holder.count = 1
        holder.states.append(state)

    async def wait() -> None:
        await holder.drain.drained()
        found.append(holder.count)

    holder.drain._announce = slip_in
    holder.drain.end()
    waiting = asyncio.create_task(wait())
    await until(lambda: holder.states == ["draining", "drained", "draining"])
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
    await holder.drained()

    assert holder.states == ["draining", "ready", "draining", "drained"]


@given(st.lists(st.sampled_from(["drain", "serve", "begin", "end", "look", "send", "read"]), max_size=30))
def test_state_follows_from_the_last_word_and_what_holds(words: list[str]) -> None:
    async def play() -> None:
        holder = Holder()
        wanted = drained = False
        for word in words:
            if word in ("drain", "serve"):
                wanted = word == "drain"
                holder.drain.command(wanted)
            elif word in ("send", "read"):
                holder.num_unsent = max(0, holder.num_unsent + {"send": 1, "read": -1}[word])
            else:
                holder.count = max(0, holder.count + {"begin": 1, "end": -1, "look": 0}[word])
                holder.drain.look()
            for _ in range(5):  # a look, an answer about the clients, and what follows from it
                await asyncio.sleep(0)
            drained = wanted and not holder.count and (drained or not holder.num_unsent)
            assert holder.drain.state == ("ready" if not wanted else "drained" if drained else "draining")
            num_unsent = holder.num_unsent if wanted and not holder.count and not drained else 0
            assert holder.drain.num_holding == (holder.count if wanted else 0) + num_unsent
        assert all(one != other for one, other in zip(holder.states, holder.states[1:], strict=False))  # no news is not told
        await holder.drain.close()

    with pytest.MonkeyPatch.context() as monkeypatch:
        for pace in ("CHECK_SECONDS", "UNSENT_CHECK_SECONDS"):
            monkeypatch.setattr(draining, pace, 0)
        asyncio.run(play())
