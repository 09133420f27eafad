"""The short way to a generation answers as FastAPI itself, and leaves it all other requests."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.errors import shapes
from pdcluster_worker.server.http.body_route import BodyRoute
from pdcluster_worker.server.http.worker_app import WorkerApp


class Body(BaseModel):
    number: int


async def _answer(body: Body, request: Request) -> Response:
    if body.number == 0:
        raise RequestError("number: 0 is none", status=404, param="number")
    if body.number < 0:
        raise KeyError("a bug")
    return Response(str(body.number), headers={"x-layers": ",".join(request.scope["layers"])})


class Layer:
    """Notes its name on the way in."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("layers", []).append(self._name)
        await self._app(scope, receive, send)


def _application(kind: type[FastAPI]) -> FastAPI:
    app = kind()
    app.router.add_api_route("/made", _answer, methods=["POST"], route_class_override=BodyRoute)
    app.add_middleware(Layer, name="inner")
    app.add_middleware(Layer, name="outer")
    rejected = Counter("rejected", "test", ["reason"], registry=CollectorRegistry())
    openai_errors.install(app, rejected, shapes.response)
    return app


REQUESTS: list[dict[str, Any]] = [
    {"method": "POST", "url": "/made", "json": {"number": 3}},
    {"method": "POST", "url": "/made", "json": {"number": 0}},
    {"method": "POST", "url": "/made", "json": {"number": "three"}},
    {"method": "POST", "url": "/made", "content": b"{", "headers": {"content-type": "a/b+json"}},
    {"method": "POST", "url": "/made", "content": b""},
    {"method": "GET", "url": "/made"},
    {"method": "POST", "url": "/made/"},
    {"method": "GET", "url": "/openapi.json"},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
async def test_the_short_way_answers_like_the_long_one(request_: dict[str, Any]) -> None:
    answers = []
    for kind in (FastAPI, WorkerApp):
        transport = httpx.ASGITransport(_application(kind))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.request(**request_)
        answers.append((answer.status_code, answer.content, answer.headers))

    assert answers[1] == answers[0]


async def test_layers_are_around_the_short_way() -> None:
    transport = httpx.ASGITransport(_application(WorkerApp))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post("/made", json={"number": 3})

    assert answer.headers["x-layers"] == "outer,inner"


async def test_a_bug_goes_out_to_the_layers() -> None:
    transport = httpx.ASGITransport(_application(WorkerApp))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(KeyError, match="a bug"):
            await client.post("/made", json={"number": -1})
