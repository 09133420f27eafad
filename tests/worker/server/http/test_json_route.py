"""Bodies that a JSON route takes, and those that it refuses, with the reason."""

import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.errors import error_handlers
from pdcluster_worker.server.http.json_body import INLINE_BYTES
from pdcluster_worker.server.http.limits import BodyReader, HttpLimits
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.other_models import OtherModels
from pdcluster_worker.server.http.request_context import RequestContextMiddleware
from pdcluster_worker.server.http.routes import JsonRoute, with_errors
from pdcluster_worker.server.schemas.requests import ChatRequest
from pdcluster_worker.tracing.request_trace import RecentTraces

GOOD = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 1,
    "pdcluster": {"prefill": "local"},
}
JSON = "application/json"
NO_OBJECT = "the body must be a JSON object"
NO_JSON = "the body is not valid JSON"
UNREADABLE = "the body is not JSON that can be read"


async def _echo(body: ChatRequest, request: Request) -> Response:
    return Response(body.model_dump_json())


def _client() -> httpx.AsyncClient:
    reader, metrics = BodyReader(lambda: 1 << 20, HttpLimits), Metrics()
    others = OtherModels(PolicyConfig, metrics, OpenAnswers())
    app = Starlette(
        routes=[
            JsonRoute("/echo", ChatRequest, _echo, with_errors(None), reader=reader, others=others)
        ],
        exception_handlers=error_handlers(metrics.request_rejected),
    )
    layers = RequestContextMiddleware(app, RecentTraces(), lambda: False)
    return httpx.AsyncClient(transport=httpx.ASGITransport(layers), base_url="http://worker")


@pytest.mark.parametrize("padding", ["", " " * INLINE_BYTES])
@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (json.dumps(GOOD).encode(), JSON),
        (json.dumps(GOOD).encode(), "application/json; charset=utf-8"),
        (json.dumps(GOOD).encode(), "Application/LD+JSON"),
    ],
)
async def test_a_right_body_is_taken(content: bytes, content_type: str, padding: str) -> None:
    headers = {"content-type": content_type}
    async with _client() as client:
        reply = await client.post("/echo", content=content + padding.encode(), headers=headers)

    assert (reply.status_code, reply.json()["model"]) == (200, "m")


@pytest.mark.parametrize("padding", ["", " " * INLINE_BYTES])
@pytest.mark.parametrize(
    ("content", "content_type", "words"),
    [
        (json.dumps(GOOD).encode(), "text/plain", NO_OBJECT),
        (json.dumps(GOOD).encode(), "application/x-www-form-urlencoded", NO_OBJECT),
        (json.dumps(GOOD).encode(), None, NO_OBJECT),
        (json.dumps({**GOOD, "temperature": 9, "n": "1"}).encode(), JSON, "temperature: must be"),
        (b'{"model": "m", "messages": [], "temperature": NaN}', JSON, ""),
        (b"null", JSON, NO_OBJECT),
        (b"[1]", JSON, NO_OBJECT),
        (b'"text"', JSON, NO_OBJECT),
        (b"{", JSON, NO_JSON),
        (b'{"model": "m",, }', JSON, NO_JSON),
        (b"\xff\xfe\xfd", JSON, UNREADABLE),
        (b"[" * 200_000, JSON, ""),
        (b'{"model": ' + b"1" * 5000 + b"}", JSON, UNREADABLE),
        (b'{"model": "\\ud800", "messages": []}', JSON, ""),
    ],
)
async def test_a_wrong_body_is_refused(
    content: bytes, content_type: str | None, words: str, padding: str
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    async with _client() as client:
        reply = await client.post("/echo", content=content + padding.encode(), headers=headers)

    assert reply.status_code in (400, 413)
    assert reply.json()["error"]["message"].startswith(words)


async def test_no_body_is_refused() -> None:
    async with _client() as client:
        reply = await client.post("/echo", headers={"content-type": JSON})

    assert reply.json()["error"]["message"].startswith(NO_OBJECT)
