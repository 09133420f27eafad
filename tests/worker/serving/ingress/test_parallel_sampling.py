"""Several choices as one stream: order of starting, abort of one, errors, closing."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.serving.ingress.ingress import ParallelSampling


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


async def test_choices_others_start_after_the_second_token_of_the_first() -> None:
    gate = asyncio.Event()
    first, second = Script("a", 3, gate), Script("b", 2)
    choices = ParallelSampling({"a": first.stream(), "b": second.stream()})
    async with aclosing(choices) as tokens:
        assert (await anext(tokens)).token == Token("a", 0)
        await asyncio.sleep(0)
        assert not second.started
        gate.set()
        rest = [(g.index, g.token.token_id) async for g in tokens]

    assert sorted(rest) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert rest.index((0, 1)) < rest.index((1, 0))


async def test_choices_others_start_when_the_first_ends_at_once() -> None:
    scripts = [Script("a", 1), Script("b", 2)]
    choices = ParallelSampling({s.name: s.stream() for s in scripts})

    assert [(g.index, g.token.token_id) async for g in choices] == [(0, 0), (1, 0), (1, 1)]


async def test_choices_abort_ends_one_and_leaves_its_siblings() -> None:
    never = asyncio.Event()
    first, second = Script("a", 2, never), Script("b", 2)
    choices = ParallelSampling({"a": first.stream(), "b": second.stream()})
    tokens = choices
    await anext(tokens)
    choices.abort("a")

    assert [(g.index, g.token.token_id) async for g in tokens] == [(1, 0), (1, 1)]
    assert first.closed


async def test_choices_error_of_one_ends_all() -> None:
    never = asyncio.Event()
    first, second = Script("a", 2, error=RequestError("broken")), Script("b", 2, never)
    choices = ParallelSampling({"a": first.stream(), "b": second.stream()})
    with pytest.raises(RequestError, match="broken"):
        [g async for g in choices]

    assert second.closed or not second.started


async def test_choices_closing_closes_every_stream() -> None:
    never = asyncio.Event()
    first = Script("a", 2, never)
    tokens = ParallelSampling({"a": first.stream()})
    await anext(tokens)
    await tokens.aclose()

    assert first.closed
