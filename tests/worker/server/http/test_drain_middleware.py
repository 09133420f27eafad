"""Keep-alive connections while the worker drains."""

import pytest


async def test_connections_are_kept_until_the_worker_drains_and_closed_then(rig, wire):
    assert "connection" not in (await wire.get("/version")).headers
    rig.backend.drains = True
    assert (await wire.get("/version")).headers["connection"] == "close"
    rig.backend.drains = False  # it was called back
    assert "connection" not in (await wire.get("/version")).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_begins_in_the_drain_comes_whole_and_is_the_last(rig, wire, stream):
    rig.backend.drains = True
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    reply = await wire.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.headers["connection"]) == (200, "close")
    assert (
        reply.text.endswith("data: [DONE]\n\n")
        if stream
        else reply.json()["choices"][0]["message"]["content"] == "Hello, world!"
    )
