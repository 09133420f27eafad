"""A trace of requests over one ingress, and all that came back: each event of each stream, to be
judged afterwards.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from pdctl.bench.load import BenchRequest
from tests.system.client import Json, body
from tests.system.tokens import tokens_in

TIMEOUT_SECONDS = 120.0


@dataclass
class Exchange:
    """One request and what its client has of it.  status: 0 = the connection broke before the
    headers; times in seconds
    """

    ask: BenchRequest
    status: int = 0
    events: list[str] = field(default_factory=list)
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    refusal: str = ""

    @property
    def chunks(self) -> list[Json]:
        """Its events, the end mark aside."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def text(self) -> str:
        return "".join(
            choice["text"] for chunk in self.chunks for choice in chunk.get("choices", [])
        )

    def fault(self) -> str | None:
        """Reason why it was not answered exactly once, in whole; None = it was."""
        chunks = self.chunks
        ends = [
            choice["finish_reason"]
            for chunk in chunks
            for choice in chunk.get("choices", [])
            if choice["finish_reason"]
        ]
        counted = [usage for chunk in chunks if (usage := chunk.get("usage"))]
        if self.status != httpx.codes.OK or any("error" in chunk for chunk in chunks):
            return (
                f"{self.status} "
                f"{self.refusal}{[chunk['error'] for chunk in chunks if 'error' in chunk]}"
            )
        if (ends, len(counted), self.events.count("[DONE]"), self.events[-1:]) != (
            ["length"],
            1,
            1,
            ["[DONE]"],
        ):
            return f"ends={ends} usages={len(counted)} last={self.events[-1:]}"
        made = (counted[0]["prompt_tokens"], counted[0]["completion_tokens"])
        wanted = (len(self.ask.prompt), self.ask.num_output_tokens)
        return None if made == wanted else f"usage {made}, expected {wanted}"

    @property
    def tokens(self) -> list[int]:
        return tokens_in(self.text)

    @property
    def gaps(self) -> list[float]:
        """Seconds between its tokens; the last two events are the usage and the end mark."""
        return [later - earlier for earlier, later in pairwise(self.token_times[:-2])]


Gate = Callable[[int], Awaitable[None]]
"""Returns when the request of that index may leave."""


async def at_once(_: int) -> None:
    """A gate that holds nothing."""


async def run_trace(
    url: str,
    needs_ping: Sequence[BenchRequest],
    arrivals: Sequence[float],
    gate: Gate = at_once,
    **fields: Any,
) -> list[Exchange]:
    """Send each at its time, or when its gate opens if that is later, and return when all have
    ended.  fields: of every request
    """
    exchanges, start = [Exchange(ask) for ask in needs_ping], time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async def one(index: int) -> None:
        await asyncio.sleep(start + arrivals[index] - time.monotonic())
        await gate(index)
        await _exchange(client, f"{url}/v1/completions", exchanges[index], fields)

    async with (
        httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(len(exchanges)):
            group.create_task(one(index))
    return exchanges


async def _exchange(client: httpx.AsyncClient, url: str, exchange: Exchange, fields: Json) -> None:
    ask = exchange.ask
    assert isinstance(ask.prompt, list)
    streamed: Json = {"stream": True, "stream_options": {"include_usage": True}}
    request = body(ask.prompt, max_tokens=ask.num_output_tokens, **streamed, **fields)
    exchange.sent = time.monotonic()
    try:
        async with client.stream("POST", url, json=request) as reply:
            exchange.status = reply.status_code
            if reply.status_code != httpx.codes.OK:
                exchange.refusal = (await reply.aread()).decode()
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    exchange.events.append(line[6:])
                    exchange.token_times.append(time.monotonic())
    except httpx.TransportError as e:
        exchange.refusal = f"{e!r} after {len(exchange.events)} events"
        exchange.status = 0
