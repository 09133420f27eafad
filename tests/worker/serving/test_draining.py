"""States ready, draining and drained of a worker, on counters of what holds it and of clients that
have not taken all.
"""

import asyncio
from collections.abc import AsyncIterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.peers.records import WorkerState
from pdcluster_worker.serving import draining
from pdcluster_worker.serving.draining import DrainController
from tests.worker.serving.doubles import until

DEADLINE_SECONDS = 20


class Holder:
    """Something that holds a drain, clients that read slowly, and the states that were announced.

    names:     of the clients, the first num_unsent of them.
    answering: cleared, an answer to which clients there are is on the way until it is set.
    error:     raised instead of an answer.
    """

    names: tuple[str, ...] = tuple(f"client {number}" for number in range(30))
    error: Exception | None = None

    def __init__(self) -> None:
        self.count = 0
        self.num_unsent = 0
        self.num_asked = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self.states: list[WorkerState] = []
        self.drain = DrainController(
            lambda: self.count, self.states.append, self._poll_clients_once
        )

    async def _poll_clients_once(self) -> frozenset[str]:
        unacked = frozenset(self.names[: self.num_unsent])
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        await self.answering.wait()
        return unacked

    async def drained(self) -> None:
        await until(lambda: self.drain.state == "drained")


@pytest.fixture
async def holder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Holder]:
    monkeypatch.setattr(draining, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(draining, "UNSENT_CHECK_SECONDS", 0.001)
    holder = Holder()
    yield holder
    await holder.drain.close()


async def test_drain_waits_for_clients_there_when_the_last_request_has_ended_and_no_others(holder):
    """Refusals and scrapes go on, and some answer is always on the way."""
    holder.num_unsent = 2
    holder.drain.command(True)
    await until(lambda: holder.num_asked >= 2)
    holder.names = (holder.names[1], "x")
    await until(lambda: holder.drain.num_holding == 1)
    holder.names = ("x", "y")
    await holder.drained()

    assert holder.states == ["draining", "drained"]


async def test_clients_there_are_counted_again_when_another_request_has_ended(holder):
    holder.num_unsent = 1
    holder.drain.command(True)
    await until(lambda: holder.num_asked >= 2)
    holder.count = 1
    holder.drain.poll()
    holder.names, holder.count = ("x",), 0
    num_asked = holder.num_asked
    await until(lambda: holder.num_asked >= num_asked + 3)
    assert (holder.drain.state, holder.drain.num_holding) == ("draining", 1)
    holder.num_unsent = 0
    await holder.drained()


async def test_drain_goes_on_when_it_cannot_ask_for_clients_and_says_so_once(holder, caplog):
    holder.error = RuntimeError("can't start new thread")
    holder.drain.command(True)
    await until(lambda: holder.num_asked >= 3)
    assert holder.states == ["draining"]
    holder.error = None
    await holder.drained()

    (record,) = (record for record in caplog.records if record.exc_info)
    assert "cannot read the unsent bytes of connections" in record.message
    assert holder.states == ["draining", "drained"]


async def test_each_drain_gives_up_when_it_cannot_ask_for_clients_at_all(
    holder, monkeypatch, caplog
):
    monkeypatch.setattr(draining, "MOST_FAILURES", 5)
    holder.num_unsent, holder.error = 1, RuntimeError("can't start new thread")
    for turn in (1, 2):
        holder.drain.command(True)
        await holder.drained()
        assert (holder.num_asked, caplog.text.count("no longer waiting")) == (5 * turn, turn)
        holder.drain.command(False)

    assert holder.states == ["draining", "drained", "ready"] * 2


async def test_drain_that_was_withdrawn_leaves_its_failures_behind(holder):
    holder.error = RuntimeError("can't start new thread")
    holder.drain.command(True)
    await until(lambda: holder.num_asked == draining.MOST_FAILURES - 1)
    holder.drain.command(False)
    holder.num_asked = 0
    holder.drain.command(True)
    await holder.drained()

    assert holder.num_asked == draining.MOST_FAILURES


async def test_what_clients_have_yet_to_take_while_something_else_holds_counts_nothing(
    holder, monkeypatch
):
    """They are read now and then, so that a stalled client is known when the requests end."""
    monkeypatch.setattr(draining, "FOLLOW_SECONDS", 0.001)
    holder.count = holder.num_unsent = 1
    holder.drain.command(True)
    await until(lambda: holder.num_asked >= 3)
    assert (holder.states, holder.drain.num_holding) == (["draining"], 1)

    holder.num_unsent = holder.count = 0
    await holder.drained()


async def test_request_that_ends_while_clients_are_counted_voids_the_count(holder):
    """Its own client may not be in it."""
    holder.count = 1
    holder.answering.clear()
    holder.drain.command(True)
    await until(lambda: holder.num_asked == 1)
    holder.count, holder.num_unsent = 0, 1
    holder.drain.poll()
    holder.answering.set()
    await until(lambda: holder.num_asked >= 3)
    assert holder.states == ["draining"]

    holder.num_unsent = 0
    await holder.drained()


async def test_clients_are_seldom_counted_while_something_else_holds_and_never_after_the_drain(
    holder,
):
    """Output of a drained worker, such as to a scraper, does not make it drain again."""
    holder.count = 1
    looks = 0

    def count_looks() -> int:
        nonlocal looks
        looks += 1
        return holder.count

    holder.drain._num_holding = count_looks
    holder.drain.command(True)
    await until(lambda: looks >= 20)
    assert holder.num_asked == 1

    holder.count = 0
    await holder.drained()
    holder.num_unsent, looks = 1, 0
    await until(lambda: looks >= 10)

    assert (holder.num_asked, holder.states) == (2, ["draining", "drained"])


@pytest.mark.parametrize("word", ["request", "withdrawn"])
async def test_what_comes_while_clients_are_counted_voids_the_count(holder, word):
    """A request may begin and end meanwhile: its client was not counted."""
    holder.answering.clear()
    holder.drain.command(True)
    await until(lambda: holder.num_asked == 1)
    if word == "request":
        holder.count = 1
        holder.drain.poll()
        holder.count = 0
        holder.drain.poll()
    else:
        holder.drain.command(False)
        holder.drain.command(True)
    holder.num_unsent = 1
    holder.answering.set()
    await until(lambda: holder.num_asked == 3)

    assert "drained" not in holder.states


async def test_drained_worker_drains_again_while_something_slipped_in(holder):
    holder.drain.command(True)
    await holder.drained()
    holder.count = 1
    holder.drain.poll()
    holder.num_unsent = 1
    holder.count = 0
    await until(lambda: holder.num_asked >= 3)
    assert holder.drain.state == "draining"  # for its client, too
    holder.num_unsent = 0
    await holder.drained()

    assert holder.states == ["draining", "drained", "draining", "drained"]


@pytest.mark.parametrize("name", ["command", "leave_role"])
async def test_a_command_is_noticed_after_a_time_and_an_end_at_once(holder, monkeypatch, name):
    command = getattr(holder.drain, name)
    assert holder.drain.is_noticed
    command(True)
    assert not holder.drain.is_noticed
    monkeypatch.setattr(draining, "NOTICE_SECONDS", 0.0)
    command(True)  # the same one
    assert holder.drain.is_noticed

    monkeypatch.undo()
    command(False)
    command(True)
    assert not holder.drain.is_noticed
    holder.drain.end()
    assert holder.drain.is_noticed


async def test_time_counts_from_the_end_and_a_command_may_say_less(holder):
    drain = holder.drain
    assert drain.seconds_left == inf
    holder.count = 1
    drain.command(True, 25)
    assert drain.seconds_left == inf  # the process is not asked to end yet
    drain.end()
    first = drain.seconds_left
    assert 20 < first <= 25 - draining.LAST_SECONDS
    drain.end()
    assert drain.seconds_left <= first
    drain.command(True, 2)
    assert drain.seconds_left < 0
    drain.command(False)
    assert drain.seconds_left == inf


async def test_a_command_gives_no_more_time_than_the_pod_has():
    drain = DrainController(lambda: 1, lambda state: None, no_clients, grace_seconds=30)
    drain.end()
    drain.command(True, 300)
    assert 20 < drain.seconds_left <= 30 - draining.LAST_SECONDS
    await drain.close()


async def no_clients() -> frozenset[str]:
    return frozenset()


async def test_end_is_not_taken_back_by_a_command(holder):
    holder.count = 1
    holder.drain.command(True)
    holder.drain.end()
    for present in (False, True, False):
        holder.drain.command(present)
    assert (holder.drain.state, holder.states) == ("draining", ["draining"])

    holder.count = 0
    async with asyncio.timeout(DEADLINE_SECONDS):
        await holder.drain.drained()

    assert holder.states == ["draining", "drained"]


async def test_drained_returns_only_while_nothing_holds(holder):
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


@given(
    st.lists(
        st.sampled_from(["drain", "serve", "begin", "end", "look", "send", "read"]), max_size=30
    )
)
def test_state_follows_from_the_last_word_and_what_holds(words):
    async def play() -> None:
        holder = Holder()
        wanted = drained = False
        num_left: int | None = None
        for word in words:
            if word in ("drain", "serve"):
                wanted = word == "drain"
                holder.drain.command(wanted)
            elif word in ("send", "read"):
                holder.num_unsent = max(0, holder.num_unsent + {"send": 1, "read": -1}[word])
            else:
                holder.count = max(0, holder.count + {"begin": 1, "end": -1, "look": 0}[word])
                holder.drain.poll()
            for _ in range(5):  # a look, an answer about the clients, and what follows from it
                await asyncio.sleep(0)
            if not wanted or holder.count:
                num_left = None
            elif not drained:
                num_left = min(
                    holder.num_unsent, len(holder.names) if num_left is None else num_left
                )
            drained = wanted and not holder.count and (drained or not num_left)
            assert holder.drain.state == (
                "ready" if not wanted else "drained" if drained else "draining"
            )
            assert holder.drain.num_holding == (holder.count if wanted else 0) + (num_left or 0)
        # every call is a change
        assert all(
            one != other for one, other in zip(holder.states, holder.states[1:], strict=False)
        )
        await holder.drain.close()

    with pytest.MonkeyPatch.context() as monkeypatch:
        for pace in ("CHECK_SECONDS", "UNSENT_CHECK_SECONDS"):
            monkeypatch.setattr(draining, pace, 0)
        asyncio.run(play())
