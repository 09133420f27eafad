"""Several choices as one stream: order of starting, abort of one, errors, closing."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.serving.ingress.ingress import sample_in_parallel


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


async def test_choices_others_start_after_the_second_token_of_the_first():
    gate = asyncio.Event()
    first, second = Script("a", 3, gate), Script("b", 2)
    async with aclosing(sample_in_parallel([first.stream(), second.stream()])) as tokens:
        assert (await anext(tokens)).token == Token("a", 0)
        await asyncio.sleep(0)
        assert not second.started
        gate.set()
        rest = [(g.index, g.token.token_id) async for g in tokens]

    assert sorted(rest) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert rest.index((0, 1)) < rest.index((1, 0))


async def test_choices_others_start_when_the_first_ends_at_once():
    choices = sample_in_parallel([Script("a", 1).stream(), Script("b", 2).stream()])

    assert [(g.index, g.token.token_id) async for g in choices] == [(0, 0), (1, 0), (1, 1)]


async def test_choices_end_of_one_leaves_its_siblings():
    first, second = Script("a", 2, asyncio.Event()), Script("b", 2)
    tokens = sample_in_parallel([first.stream(), second.stream()])
    await anext(tokens)
    tokens.end(0)

    assert [(g.index, g.token.token_id) async for g in tokens] == [(1, 0), (1, 1)]
    assert first.closed


async def test_choices_error_of_one_ends_all():
    first = Script("a", 2, error=RequestError("broken"))
    second = Script("b", 2, asyncio.Event())
    with pytest.raises(RequestError, match="broken"):
        [g async for g in sample_in_parallel([first.stream(), second.stream()])]

    assert second.closed or not second.started
