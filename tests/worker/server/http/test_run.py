"""Binding, refusing and closing of the HTTP server."""

import asyncio
import signal
import socket
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx
import pytest

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.server.http.run import serve

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
DEADLINE_SECONDS = 20


async def test_a_taken_port_is_a_config_error(rig, server):
    with pytest.raises(ConfigError, match=f"port {server.port} is taken: .* set listen.http"):
        await serve(rig.app, "127.0.0.1", server.port)


async def test_a_foreign_address_is_a_config_error(rig):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await serve(rig.app, "192.0.2.1", 0)


async def test_signals_stay_with_the_caller(rig):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = await serve(rig.app, "127.0.0.1", 0)
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    await server.close()

    assert before == after
    assert server.finished.done()


async def test_a_server_that_refuses_lets_open_streams_end(rig, server, wire, until):
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        server.refuse()
        await until(lambda: not _connects(server.port))
        rig.backend.gate.set()
        answer = await asking

    assert await server.has_finished(DEADLINE_SECONDS)
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_close_cuts_streams_off(rig, server, wire):
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        server.refuse()
        assert not await server.has_finished(0.3)
        await server.close()
        await rig.backend.cancelled.wait()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking


def _connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_an_idle_server_sets_no_timer_and_ends_on_a_signal(rig, monkeypatch):
    """uvicorn's own loop looks at itself ten times a second."""
    sleeps = []
    sleep = asyncio.sleep
    monkeypatch.setattr(
        asyncio, "sleep", lambda seconds, *rest: (sleeps.append(seconds), sleep(seconds, *rest))[1]
    )
    server = await serve(rig.app, "127.0.0.1", 0)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", trust_env=False
    ) as http:
        date = parsedate_to_datetime((await http.get("/health")).headers["date"])
    assert sleeps == []
    server.refuse()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await server.finished

    assert abs(datetime.now(UTC) - date) < timedelta(minutes=1)
