"""API keys at the door: what is closed without one, what stays open, and the error that OpenAI's
clients understand.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.server.app import create_prefill_app
from pdcluster_worker.server.http.api_keys import ApiKeys
from pdcluster_worker.server.http.run import HttpServer, serve
from tests.worker.server.conftest import asgi_client

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    (tmp_path / "alice").write_text("sk-alice")
    return ApiKeys(tmp_path)


@pytest.fixture
async def closed(rig, keys: ApiKeys) -> AsyncIterator[HttpServer]:
    """The application with keys, on a real socket."""
    server = await serve(rig.make_app(tenant_of=keys.tenant_of), "127.0.0.1", 0)
    yield server
    await server.close()


@pytest.fixture
async def direct_writer(closed: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{closed.port}", timeout=20, trust_env=False
    ) as client:
        yield client


@pytest.mark.parametrize("header", ["Bearer sk-alice", "bearer sk-alice", "Bearer  sk-alice"])
async def test_a_good_key_opens(direct_writer, header):
    assert (
        await direct_writer.post(
            "/v1/chat/completions", json=BODY, headers={"authorization": header}
        )
    ).status_code == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "you did not provide an API key"),
        ({"authorization": "sk-alice"}, "you did not provide an API key"),
        ({"authorization": "Basic sk-alice"}, "you did not provide an API key"),
        ({"authorization": "Bearer"}, "you did not provide an API key"),
        ({"authorization": "Bearer sk-alic"}, "incorrect API key provided"),
        ({"authorization": b"Bearer \xff\xfe"}, "incorrect API key provided"),
        ({"authorization": "Bearer sk-alice sk-alice"}, "incorrect API key provided"),
    ],
)
async def test_anything_else_is_a_401_and_never_reaches_the_model(
    rig, direct_writer, headers, message
):
    reply = await direct_writer.post("/v1/chat/completions", json=BODY, headers=headers)

    error = reply.json()["error"]
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        None,
        "invalid_api_key",
    )
    assert message in error["message"]
    assert "x-request-id" in reply.headers
    assert rig.backend.calls == []
    assert rig.value("pdcluster_request_rejected_total", reason="invalid_api_key") == 1


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/tiny", "/v1/completions", "/v1/nothing", "/v1", "/%761/models"],
)
async def test_the_whole_api_is_closed(direct_writer, path):
    assert (await direct_writer.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
async def test_probes_and_scrapers_need_no_key(direct_writer, path):
    assert (await direct_writer.get(path)).status_code == 200


async def test_with_no_key_left_every_request_is_refused_and_probes_go_on(
    rig, direct_writer, keys, tmp_path
):
    (tmp_path / "alice").unlink()
    assert keys.reload()
    for headers in ({}, {"authorization": "Bearer sk-alice"}, {"authorization": "Bearer"}):
        assert (
            await direct_writer.post("/v1/chat/completions", json=BODY, headers=headers)
        ).status_code == 401
    assert (rig.backend.calls, (await direct_writer.get("/ready")).status_code) == ([], 200)


async def test_a_prefill_worker_asks_for_keys_too(rig, keys):
    app = create_prefill_app(rig.backend, Metrics(), PolicyConfig, tenant_of=keys.tenant_of)
    async with asgi_client(app) as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("is_prefill", [False, True])
async def test_adapters_are_loaded_with_a_key_alone(rig, direct_writer, keys, is_prefill):
    path, body = "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"}
    prefill = create_prefill_app(rig.backend, Metrics(), PolicyConfig, tenant_of=keys.tenant_of)
    async with asgi_client(prefill) as of_prefill:
        http = of_prefill if is_prefill else direct_writer
        assert (await http.post(path, json=body)).status_code == 401
        assert rig.backend.adapters_called == []
        headers = {"authorization": "Bearer sk-alice"}
        assert (await http.post(path, json=body, headers=headers)).status_code == 200
    assert rig.backend.adapters_called == [("load", "sql", "sql")]
