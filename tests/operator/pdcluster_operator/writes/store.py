"""An API server that has nothing yet, and keeps account of what it is sent."""

import asyncio
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from pdcluster_api.apiserver.client import ClientLimits
from tests.apiserver import cluster_objects as objects
from tests.operator.pdcluster_api.apiserver.answering_server import AnsweringServer

OWNER = {"metadata": {"uid": "owner-uid", "name": objects.NAME, "namespace": "default"}}
ONE_TRY = ClientLimits(tries=1)


class Store:
    """Answers every request as an API server that has nothing; a test may refuse some and hold
    others back.

    order:   names in the order in which their requests came
    refused: HTTP status by name
    held:    names whose answers wait for `release`
    """

    def __init__(self, refused: dict[str, int] | None = None, held: Iterable[str] = ()) -> None:
        self.order: list[str] = []
        self.refused, self.held, self.release = refused or {}, set(held), asyncio.Event()
        self.num_open, self.most_open = 0, 0
        self.arrived: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"kind": "Status", "message": "there is none"}, status=404)
        body: dict[str, Any] = await request.json()
        name = f"{body['kind']} {body['metadata']['name']}"
        self.order.append(name)
        self.arrived.put_nowait(name)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if name in self.held:
            await self.release.wait()
        self.num_open -= 1
        if name in self.refused:
            return web.json_response(
                {"kind": "Status", "message": f"{name} is refused"}, status=self.refused[name]
            )
        return web.json_response(
            {**body, "metadata": {**body["metadata"], "uid": name, "resourceVersion": "7"}},
            status=201,
        )

    def serve(self) -> AnsweringServer:
        """A server that gives these answers."""
        return AnsweringServer([self.answer] * 100, ONE_TRY)
