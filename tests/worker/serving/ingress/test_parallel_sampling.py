"""Several choices as one stream: order of starting, abort of one, errors, closing."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.serving.ingress.branches import ParallelBranches
from pdcluster_worker.serving.ingress.migration import AttemptRoute
from pdcluster_worker.streams import Merged


class Script:
    """A stream of so many tokens that records whether it has started and was closed."""

    def __init__(
        self,
        name: str,
        count: int,
        gate: asyncio.Event | None = None,
        error: Exception | None = None,
    ) -> None:
        self.name, self.count, self.gate, self.error = name, count, gate, error
        self.started = self.closed = False

    async def stream(self) -> AsyncGenerator[Generated, None]:
        self.started = True
        try:
            for i in range(self.count):
                yield Generated(Token(self.name, i))
                if self.gate is not None and i == 0:
                    await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


HOME, ELSEWHERE = (AttemptRoute(None, True, None, kv_holder=name) for name in ("", "home"))


def sample_in_parallel(
    *scripts: Script, elsewhere: Sequence[int] = (), routes: list[AttemptRoute] | None = None
) -> Merged[Generated]:
    """elsewhere: choices that go to another worker.  routes: notes where each begins."""

    def begin(index: int, route: AttemptRoute) -> AsyncGenerator[Generated, None]:
        if routes is not None:
            routes[index] = route
        return scripts[index].stream()

    def place(waiting: list[int]) -> list[tuple[AttemptRoute, list[int]]]:
        return [(ELSEWHERE, [each for each in waiting if each in elsewhere])]

    return ParallelBranches(len(scripts), HOME, begin, place).merged()


async def test_choices_others_start_after_the_second_token_of_the_first():
    gate = asyncio.Event()
    first, second = Script("a", 3, gate), Script("b", 2)
    async with aclosing(sample_in_parallel(first, second)) as tokens:
        assert (await anext(tokens)).token == Token("a", 0)
        await asyncio.sleep(0)
        assert not second.started
        gate.set()
        rest = [(g.index, g.token.token_id) async for g in tokens]

    assert sorted(rest) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert rest.index((0, 1)) < rest.index((1, 0))


async def test_choices_others_start_when_the_first_ends_at_once():
    choices = sample_in_parallel(Script("a", 1), Script("b", 2))

    assert [(g.index, g.token.token_id) async for g in choices] == [(0, 0), (1, 0), (1, 1)]


async def test_choices_end_of_one_leaves_its_siblings():
    first, second = Script("a", 2, asyncio.Event()), Script("b", 2)
    tokens = sample_in_parallel(first, second)
    await anext(tokens)
    tokens.end(0)

    assert [(g.index, g.token.token_id) async for g in tokens] == [(1, 0), (1, 1)]
    assert first.closed


async def test_choices_error_of_one_ends_all():
    first = Script("a", 2, error=RequestError("broken"))
    second = Script("b", 2, asyncio.Event())
    with pytest.raises(RequestError, match="broken"):
        [g async for g in sample_in_parallel(first, second)]

    assert second.closed or not second.started


async def until(condition: Callable[[], object], tokens: Merged[Generated]) -> None:
    while not condition():
        await anext(tokens)


async def test_first_choice_elsewhere_brings_the_prompt_for_the_others_there():
    gate = asyncio.Event()
    scripts = [Script("a", 3), Script("b", 3, gate), Script("c", 2), Script("d", 2)]
    routes = [HOME] * 4
    async with aclosing(sample_in_parallel(*scripts, elsewhere=[1, 2], routes=routes)) as tokens:
        await until(lambda: scripts[1].started and scripts[3].started, tokens)
        assert not scripts[2].started
        gate.set()
        rest = [(g.index, g.token.token_id) async for g in tokens]

    assert routes == [HOME, ELSEWHERE, ELSEWHERE, HOME]
    assert rest.index((1, 1)) < rest.index((2, 0))
    assert all(script.closed for script in scripts)


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted", "ended"])
async def test_next_choice_elsewhere_brings_the_prompt_where_the_first_ends_early(is_aborted):
    gate = asyncio.Event()
    scripts = [Script("a", 2), Script("b", 1, gate), Script("c", 2), Script("d", 1)]
    tokens = sample_in_parallel(*scripts, elsewhere=[1, 2, 3])
    await until(lambda: scripts[1].started, tokens)
    if is_aborted:
        tokens.end(1)
    else:
        gate.set()
    rest = [(g.index, g.token.token_id) async for g in tokens]

    assert rest.index((2, 1)) < rest.index((3, 0))
    assert scripts[1].closed


async def test_choice_that_was_ended_before_the_prompt_was_cached_brings_it_nowhere():
    gate = asyncio.Event()
    scripts = [Script("a", 2, gate), Script("b", 2), Script("c", 2)]
    tokens = sample_in_parallel(*scripts, elsewhere=[1, 2])
    await anext(tokens)
    tokens.end(1)
    await asyncio.sleep(0)
    gate.set()

    assert [(g.index, g.token.token_id) async for g in tokens] == [(0, 1), (2, 0), (2, 1)]
    assert not scripts[1].started


async def test_choices_are_not_placed_where_the_first_ends_before_its_prompt_is_cached():
    scripts, routes = [Script("a", 1), Script("b", 2)], [HOME] * 2
    rest = [g async for g in sample_in_parallel(*scripts, elsewhere=[1], routes=routes)]

    assert (len(rest), routes) == (3, [HOME, HOME])


@given(st.data())
def test_every_choice_is_made_whole_whatever_ends_before_it(data):
    counts = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    groups = [data.draw(st.integers(0, 2)) for _ in counts]  # 0: home
    ended_at = data.draw(
        st.dictionaries(st.integers(0, 10), st.integers(0, len(counts) - 1), max_size=4)
    )
    made: dict[int, list[int]] = {index: [] for index in range(len(counts))}

    async def run() -> None:
        scripts = [Script(str(index), count) for index, count in enumerate(counts)]
        routes = [AttemptRoute(None, True, None, kv_holder=name) for name in "ab"]

        def place(waiting: list[int]) -> list[tuple[AttemptRoute, list[int]]]:
            return [
                (route, [each for each in waiting if groups[each] == number])
                for number, route in enumerate(routes, start=1)
            ]

        merged = ParallelBranches(
            len(scripts), HOME, lambda index, _: scripts[index].stream(), place
        ).merged()
        async with asyncio.timeout(20), aclosing(merged) as tokens:
            async for number, generated in aenumerate(tokens):
                made[generated.index].append(generated.token.token_id)
                if number in ended_at:
                    tokens.end(ended_at[number])
                await asyncio.sleep(0)

    asyncio.run(run())
    for index, count in enumerate(counts):
        if index not in ended_at.values():
            assert made[index] == list(range(count))


async def aenumerate(tokens: Merged[Generated]) -> AsyncGenerator[tuple[int, Generated], None]:
    number = 0
    async for generated in tokens:
        yield number, generated
        number += 1
