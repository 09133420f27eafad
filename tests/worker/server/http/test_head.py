"""HEAD says what GET says, without a body: status, headers and the need of a key."""

from pathlib import Path

import pytest

PATHS = ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/version", "/metrics"]


@pytest.mark.parametrize("path", PATHS)
async def test_head_has_the_status_and_the_headers_of_get(wire, path):
    got, head = await wire.get(path), await wire.head(path)

    assert (head.status_code, head.content) == (200, b"")
    assert got.content
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    # on the same connection, which is not out of step
    assert (await wire.get(path)).status_code == 200


async def test_head_tells_that_a_worker_is_not_ready(rig, wire):
    rig.backend.not_ready = "the model is loading"
    reply = await wire.head("/ready")

    assert (reply.status_code, reply.content) == (503, b"")


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 405), ("/v2/nothing", 404)])
async def test_head_of_what_get_does_not_serve_is_refused(wire, path, status):
    reply = await wire.head(path)

    assert (reply.status_code, reply.content) == (status, b"")


async def test_head_needs_a_key_where_get_does(rig, tmp_path: Path):
    async with rig.keyed(tmp_path, "alice") as client:
        replies = [await client.head(path) for path in ("/v1/models", "/health")]
        keyed = await client.head("/v1/models", headers={"authorization": "Bearer sk-alice"})

    assert [reply.status_code for reply in (*replies, keyed)] == [401, 200, 200]
    assert [reply.content for reply in (*replies, keyed)] == [b""] * 3


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/chat/completions", "POST"), ("/v1/responses/r", "DELETE, GET, HEAD")],
)
async def test_the_answer_to_a_wrong_method_names_all_that_the_path_serves(wire, path, methods):
    reply = await wire.put(path)

    assert (reply.status_code, reply.headers["allow"]) == (405, methods)
    assert f"use {methods}" in reply.json()["error"]["message"]
