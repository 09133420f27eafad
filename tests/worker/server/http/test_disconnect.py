"""A client that goes away, or reads no more, closes the backend's stream, whichever form it asked
for and whenever it leaves.
"""

import asyncio
import json
from contextlib import suppress

import httpx
import pytest

from pdcluster_worker.server.http import raw_http
from pdcluster_worker.server.http.connection import HttpConnection
from pdcluster_worker.server.http.raw_http import INTERIM

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
DEADLINE_SECONDS = 5


@pytest.mark.parametrize("hold_after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_generation(rig, wire, hold_after, stream):
    rig.backend.hold_after = hold_after
    asking = asyncio.create_task(wire.post(CHAT, json={**BODY, "stream": stream}))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await rig.backend.cancelled.wait()

    assert rig.value("pdcluster_request_success_total", finish_reason="stop") == 0


async def test_a_client_that_leaves_cancels_every_prompt_of_a_list(rig, wire):
    rig.backend.hold_after = 0
    asking = asyncio.create_task(
        wire.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"]})
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        asking.cancel()
        await rig.backend.cancelled.wait()

    assert len(rig.backend.calls) == 2
    with suppress(asyncio.CancelledError):
        await asking


async def test_a_client_that_leaves_while_sending_its_body_asks_for_nothing(rig, server):
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        f"1000\r\n\r\n{{".encode()
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", trust_env=False
    ) as other:
        answer = await other.post(CHAT, json=BODY)

    assert answer.status_code == 200
    assert len(rig.backend.calls) == 1


async def test_one_client_that_leaves_does_not_disturb_another(rig, wire, until):
    rig.backend.hold_after = 3
    leaving = asyncio.create_task(wire.post(CHAT, json={**BODY, "stream": True}))
    staying = asyncio.create_task(wire.post(CHAT, json={**BODY, "stream": True}))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await until(lambda: len(rig.backend.calls) == 2)
        leaving.cancel()
        await rig.backend.cancelled.wait()
        rig.backend.gate.set()
        answer = await staying
    events = [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]

    assert answer.text.endswith("data: [DONE]\n\n")
    assert (
        "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        == "Hello, world!"
    )


async def test_a_client_that_stops_reading_is_cut_off_and_holds_up_no_drain(
    rig, server, deaf, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="pdcluster_worker")
    monkeypatch.setattr(HttpConnection, "send_seconds", 0.2)
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [104] * 300_000  # far more than the kernel's buffers hold
    await deaf({**BODY, "stream": True})
    async with asyncio.timeout(DEADLINE_SECONDS * 4):
        await rig.backend.cancelled.wait()
        server.refuse()
        assert await server.has_finished(DEADLINE_SECONDS * 4)

    assert "client stopped reading, connection aborted" in caplog.text
    (ended,) = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert ended["reason"] == "disconnected"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_only_ends_its_sending_side_is_answered(rig, server, stream, version):
    rig.backend.hold_after = 0
    body = json.dumps({**BODY, "stream": stream})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {CHAT} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    writer.write_eof()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        interim = await reader.readexactly(len(INTERIM)) if version == "1.1" else b""
        rig.backend.gate.set()
        answer = await reader.read()

    head = answer.replace(INTERIM, b"").partition(b"\r\n\r\n")[0].lower()
    assert interim in (INTERIM, b"")
    assert head.startswith(b"http/1.1 200 ok")
    assert b"connection: close" in head
    assert b"Hello, world!" in answer or b"[DONE]" in answer
    writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_client_that_leaves_cancels_the_generation_in_every_version(
    rig, server, version, monkeypatch
):
    monkeypatch.setattr(raw_http, "_UNKNOWN_SECONDS", 0.2)
    rig.backend.hold_after = 0
    body = json.dumps(BODY)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"POST {CHAT} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        writer.close()
        await rig.backend.cancelled.wait()


async def test_a_client_that_ends_before_its_request_is_whole_gets_nothing(rig, server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode())
    writer.write_eof()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await reader.read() == b""
    writer.close()


async def test_an_answer_that_comes_at_once_has_nothing_before_it(rig, server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.write_eof()
    async with asyncio.timeout(DEADLINE_SECONDS):
        answer = await reader.read()
    writer.close()

    assert answer.endswith(b'"reason":null}')
    assert answer.replace(INTERIM, b"").startswith(b"HTTP/1.1 200 OK")
