"""Many streams at once from one client, and how each of them ended."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx

from tests.system.client import TIMEOUT_SECONDS, Stream, body
from tests.system.worker_process import WorkerProcess


@dataclass
class Outcome:
    """End of one request.  status: 0 when the connection broke before the headers."""

    prompt: list[int]
    ingress: str
    place: str
    status: int = 0
    stream: Stream | None = None

    @property
    def done(self) -> bool:
        return self.stream is not None and self.stream.done

    @property
    def num_tokens(self) -> int:
        return 0 if self.stream is None else len(self.stream.tokens)

    @property
    def is_clean_error(self) -> bool:
        return self.status >= httpx.codes.INTERNAL_SERVER_ERROR or (
            self.stream is not None and self.stream.error is not None
        )


class Load:
    """Runs all requests that it is given at once, each at its ingress, and counts those that are
    done.
    """

    def __init__(self, workers: dict[str, WorkerProcess], max_tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self._urls = {name: str(worker.client.http.base_url) for name, worker in workers.items()}
        self._max_tokens = max_tokens
        self._progress = asyncio.Condition()

    async def run(self, outcomes: Iterable[Outcome]) -> None:
        fresh = list(outcomes)
        self.outcomes += fresh
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for outcome in fresh:
                group.create_task(self._ask(client, outcome))

    async def wait_done(self, count: int) -> None:
        """Wait until that many answers are whole."""
        await self.wait_for(lambda: sum(outcome.done for outcome in self.outcomes) >= count)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with self._progress:
            await self._progress.wait_for(condition)

    async def _ask(self, client: httpx.AsyncClient, outcome: Outcome) -> None:
        request = body(outcome.prompt, outcome.place, max_tokens=self._max_tokens, stream=True)
        try:
            async with client.stream(
                "POST", f"{self._urls[outcome.ingress]}/v1/completions", json=request
            ) as reply:
                outcome.status = reply.status_code
                if reply.status_code == httpx.codes.OK:
                    outcome.stream = Stream(reply.headers["x-pdcluster-prefill"], iter(()))
                    await self._read(reply, outcome.stream)
        except httpx.TransportError:
            pass  # judged by what had come until then
        await self._notify()

    async def _read(self, reply: httpx.Response, stream: Stream) -> None:
        begun = False
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                stream.take(line[6:])
            if not begun and stream.texts:
                begun = True
                await self._notify()

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()
