"""The short way from a body to its endpoint refuses what FastAPI's own refuses, in
the same words.
"""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.errors import openai as openai_errors
from pdcluster_worker.server.errors import shapes as error_shapes
from pdcluster_worker.server.http.body_route import BodyRoute
from pdcluster_worker.server.http.off_loop import INLINE_BYTES
from pdcluster_worker.server.schemas.requests import ChatRequest

GOOD = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 1,
    "pdcluster": {"prefill": "local"},
}
JSON = "application/json"
LONG = (
    json.dumps(GOOD).encode(),
    json.dumps({**GOOD, "n": "1"}).encode(),
    b'{"model": NaN}',
    b'{"model": "\\ud800"}',
    b'{"model": "m",, }',
    b"\xff\xfe\xfd",
    b"{",
)
"""Beginnings of bodies that are read in a thread."""


async def _echo(body: ChatRequest, request: Request) -> Response:
    return Response(body.model_dump_json() + request.headers.get("x-more", ""))


def _client() -> httpx.AsyncClient:
    """To an application with the same endpoint on both ways."""
    app = FastAPI()
    app.post("/fastapi")(_echo)
    app.router.add_api_route("/short", _echo, methods=["POST"], route_class_override=BodyRoute)
    openai_errors.install(app, Metrics().request_rejected, error_shapes.response)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker")


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (json.dumps(GOOD).encode(), JSON),
        (json.dumps(GOOD).encode("utf-16"), JSON),
        (json.dumps(GOOD).encode(), "application/json; charset=utf-8"),
        (json.dumps(GOOD).encode(), "Application/LD+JSON"),
        (json.dumps(GOOD).encode(), "text/plain"),
        (json.dumps(GOOD).encode(), "application/x-www-form-urlencoded"),
        (json.dumps(GOOD).encode(), None),
        (json.dumps({**GOOD, "temperature": 9, "n": "1"}).encode(), JSON),
        (b'{"model": "m", "messages": [], "temperature": NaN}', JSON),
        (b"", JSON),
        (b"null", JSON),
        (b"[1]", JSON),
        (b'"text"', JSON),
        (b"{", JSON),
        (b'{"model": "m",, }', JSON),
        (b"\xff\xfe\xfd", JSON),
        (b"[" * 200_000, JSON),
        (b'{"model": ' + b"1" * 5000 + b"}", JSON),
        (b'{"model": "\\ud800"}', JSON),
        *((start + b" " * INLINE_BYTES, JSON) for start in LONG),
    ],
)
async def test_body_is_taken_or_refused_as_by_fastapi(
    content: bytes, content_type: str | None
) -> None:
    headers = (
        {"x-more": "!"} if content_type is None else {"x-more": "!", "content-type": content_type}
    )
    async with _client() as client:
        short, long = [
            await client.post(path, content=content, headers=headers)
            for path in ("/short", "/fastapi")
        ]

    assert (short.status_code, short.content) == (long.status_code, long.content)


async def test_other_methods_are_refused_as_by_fastapi_and_the_document_has_the_route() -> None:
    async with _client() as client:
        refused = await client.get("/short")
        document: dict[str, Any] = (await client.get("/openapi.json")).json()

    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (
        document["paths"]["/short"]["post"]["requestBody"]
        == document["paths"]["/fastapi"]["post"]["requestBody"]
    )
