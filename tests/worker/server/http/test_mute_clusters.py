"""A cluster that answered nothing is left alone for a while, and then looked at by one request."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.http.mute_clusters import MuteClusters


@dataclass
class Call:
    """A request for a cluster, which answers nothing until `lives`."""

    address: str = "small:8000"
    lives: bool = False
    num_looks: int = 0
    answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def is_mute(self) -> bool:
        self.num_looks += 1
        await self.answer.wait()
        return not self.lives

    def mute(self, what: str) -> RequestError:
        return RequestError(what, status=504)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def call() -> Call:
    made = Call()
    made.answer.set()
    return made


async def begins(clusters: MuteClusters, call: Call, error: RequestError | None = None) -> bool:
    """Return whether a call is made.  error: its end, after others have begun."""
    has_begun = False
    with suppress(RequestError):
        async with clusters.noted(call):
            has_begun = True
            if error is not None:
                await asyncio.sleep(0)
                raise error
    return has_begun


async def test_the_pause_grows_until_it_answers(call: Call) -> None:
    clock = Clock()
    clusters = MuteClusters(clock)
    assert await begins(clusters, call, call.mute("nothing"))
    for number, seconds in enumerate((1, 2, 4, 8, 16, 30, 30)):
        clock.now += seconds - 0.1
        assert not await begins(clusters, call)
        assert call.num_looks == number
        assert await begins(clusters, Call("other:8000"))
        clock.now += 0.1
        assert not await begins(clusters, call)
        assert call.num_looks == number + 1
    clock.now += 30
    call.lives = True
    assert await begins(clusters, call, call.mute("nothing"))
    clock.now += 1
    assert await begins(clusters, call)
    assert await begins(clusters, call)
    assert call.num_looks == 9


async def test_many_calls_that_end_together_count_once(call: Call) -> None:
    clock = Clock()
    clusters = MuteClusters(clock)
    ends = [begins(clusters, call, call.mute("nothing")) for _ in range(5)]
    assert all(await asyncio.gather(*ends))
    clock.now += 1
    call.lives = True
    assert await begins(clusters, call)


async def test_one_call_at_a_time_looks_and_one_that_is_cancelled_counts(call: Call) -> None:
    clock = Clock()
    clusters = MuteClusters(clock)
    await begins(clusters, call, call.mute("nothing"))
    clock.now += 1
    call.answer.clear()
    looking = asyncio.create_task(begins(clusters, call))
    await asyncio.sleep(0)
    assert not await begins(clusters, call)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    call.lives = True
    call.answer.set()
    clock.now += 1.9
    assert not await begins(clusters, call)
    clock.now += 0.1
    assert await begins(clusters, call)
    assert call.num_looks == 2


async def test_another_error_is_no_silence(call: Call) -> None:
    clusters = MuteClusters(Clock())
    assert await begins(clusters, call, RequestError("no", status=503))
    assert await begins(clusters, call)
