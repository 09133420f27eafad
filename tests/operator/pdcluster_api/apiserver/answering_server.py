"""A small HTTP server that gives the answers which the real API server gives only under load or in
failure: 429, 410, cut connections.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web
from prometheus_client import CollectorRegistry

from pdcluster_api.apiserver.client import ApiClient, ClientLimits
from pdcluster_api.apiserver.connection import ApiConnection, ApiMetrics, Configuration

Answer = Callable[[web.Request], Awaitable[web.Response]]


@dataclass
class AnsweringServer:
    """Answers each request with the next of `answers`; then it has nothing to say.

    seen:  every request: method, path with query, body
    slept: what the client waited, without waiting
    """

    answers: list[Answer]
    limits: ClientLimits = field(default_factory=ClientLimits)
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    async def __aenter__(self) -> Self:
        self._server = web.Server(self._answer)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        configuration = Configuration()
        configuration.host = self.url
        self.client = ApiClient(
            ApiConnection(configuration), ApiMetrics(self.registry), self.limits, self._sleep
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Address at which it answers."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def count(self, name: str, **labels: str) -> float:
        """A counter of the client's."""
        return self.registry.get_sample_value(f"pdcluster_operator_{name}", labels) or 0.0

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        text = await request.text()
        self.seen.append((request.method, request.path_qs, json.loads(text) if text else None))
        return await self.answers.pop(0)(request)


def says(code: int, body: Any = None, **headers: str) -> Answer:
    """An answer with a status and a JSON body."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({} if body is None else body, status=code, headers=headers)

    return answer


def says_text(code: int, text: str) -> Answer:
    """An answer that is not JSON, as a proxy's."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=code, text=text)

    return answer


async def hangs_up(request: web.Request) -> web.Response:
    """No answer: the connection is cut."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def never_answers(request: web.Request) -> web.Response:
    """Nothing, until the client gives up."""
    await asyncio.Event().wait()
    return web.Response()
