"""A stock engine under test, over a small server in its place."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from pdcluster_worker.messages import engine as messages
from pdcluster_worker.messages.engine import EngineOutput
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.stock_engine.engine import StockEngine
from pdcluster_worker.stock_engine.http import StockClient
from pdcluster_worker.stock_engine.metrics_page import StockMetrics, read_numbers
from pdcluster_worker.stock_engine.reports import Reports
from pdcluster_worker.stock_engine.responses import KvTransferParams, encode_handle
from tests.worker.stock_engine.fake_vllm import (
    METRICS,
    TRANSFER,
    Call,
    FakeVllm,
    fake_vllm,
    tokens_event,
)

OutputT = TypeVar("OutputT", bound=EngineOutput)


def spec(request_id: str = "r", num_tokens: int = 5, **sampling: object) -> RequestSpec:
    given = {"max_tokens": 8, "seed": 0, **sampling}
    return RequestSpec(request_id, list(range(num_tokens)), msgspec.convert(given, SamplingParams))


class Rig:
    def __init__(self, fake: FakeVllm, max_sequences: int = 8) -> None:
        self.fake = fake
        self.outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self.gone: list[str] = []
        self.stats: list[messages.EngineStats] = []
        self.http = StockClient(fake.port)
        first = read_numbers(METRICS.encode())
        self.page = StockMetrics(self.http, [first], self.gone.append)
        self.reports = Reports(self.page, 0, self.take, max_sequences=max_sequences)
        self.traces: dict[str, dict[str, str]] = {}
        self.engine = StockEngine(self.http, "m", self.reports, self.take, trace=self.trace)
        self._reading: asyncio.Task[None] | None = None

    def trace(self, request_id: str) -> dict[str, str]:
        return self.traces.get(request_id, {})

    def read_pages(self) -> None:
        self._reading = asyncio.create_task(self.page.run())

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self.engine.close()
        self.reports.close()

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output, messages.EngineStats):
                self.stats.append(output)
            else:
                self.outputs.put_nowait(output)

    async def call(self) -> Call:
        return await asyncio.wait_for(self.fake.calls.get(), 10)

    async def first_token(self) -> Call:
        """The next call, once its first token, 7, has come."""
        call = await self.call()
        await call.begin()
        await call.send(tokens_event(7))
        assert await self.tokens() == [7]
        return call

    async def fetch(self, request: RequestSpec | None = None) -> Call:
        """The call that fetches the KV of a request."""
        request = request or spec()
        self.epoch = (await self.ready_to_fetch(request)).epoch
        handle = encode_handle(KvTransferParams(TRANSFER))
        self.engine.take(messages.Fetch(request.request_id, self.epoch, handle))
        return await self.call()

    async def made(self, call: Call, token_id: int) -> Token:
        """The first token of a call, once it has come."""
        await call.begin()
        await call.send(tokens_event(token_id))
        (token,) = (await self.said(messages.Tokens)).tokens
        return token

    async def said(self, kind: type[OutputT]) -> OutputT:
        output = await asyncio.wait_for(self.outputs.get(), 10)
        assert isinstance(output, kind), output
        return output

    async def tokens(self) -> list[int]:
        return [token.token_id for token in (await self.said(messages.Tokens)).tokens]

    async def ready_to_fetch(self, request: RequestSpec) -> messages.ReceiveReady:
        self.engine.take(messages.Receive(request))
        return await self.said(messages.ReceiveReady)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def rigged(max_sequences: int = 8) -> AsyncIterator[Rig]:
    async with fake_vllm() as fake:
        rig = Rig(fake, max_sequences)
        try:
            yield rig
        finally:
            rig.close()
