"""The last moments of a server process: a request that came just before the listener closed is not cut off."""

import asyncio
import json

import httpx
import pytest

from pdcluster_worker import server_process

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
DEADLINE_SECONDS = 10
LONG = {**BODY, "stream": False, "logprobs": True, "top_logprobs": 20, "max_tokens": 2_000}
"""Its answer is far larger than the kernel's buffers."""


class LeavingNode:
    """A node that is drained while `is_drained`; counts how often it was told to leave."""

    def __init__(self) -> None:
        self.is_drained = True
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_leaves = 0
        self.finished = False

    async def leave(self) -> None:
        self.num_leaves += 1
        await self.idle.wait()
        self.is_drained = True

    async def finish(self) -> None:
        self.finished = True

    def hold(self) -> None:
        self.idle.clear()
        self.is_drained = False


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(server_process, "HTTP_DRAIN_SECONDS", 0.05)


async def test_a_stream_that_slipped_in_is_waited_for(rig, server, wire, until):
    node = LeavingNode()
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        leaving = asyncio.create_task(server_process._leave(node, server))
        await until(lambda: node.num_leaves == 1)
        node.hold()  # as a request does that comes now
        await until(lambda: node.num_leaves == 2)  # the time for last bytes is over, and the request is not
        assert not leaving.done()
        rig.backend.gate.set()
        answer = await asking
        node.idle.set()
        await leaving

    assert answer.text.endswith("data: [DONE]\n\n")
    assert node.finished


async def test_a_client_that_holds_nothing_here_does_not_hold_the_end(rig, server, wire):
    node = LeavingNode()
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        await server_process._leave(node, server)
        with pytest.raises(httpx.RemoteProtocolError):
            await asking

    assert (node.finished, server.finished.done()) == (True, True)


async def test_a_client_that_reads_slowly_gets_the_whole_answer(rig, server, deaf, until):
    node = LeavingNode()
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [104] * 2_000
    sock = await deaf(LONG)
    async with asyncio.timeout(DEADLINE_SECONDS * 4):
        await until(lambda: server.is_sending)
        leaving = asyncio.create_task(server_process._leave(node, server))
        await until(lambda: node.num_leaves >= 3)  # the time for what is open beside requests is over
        answer = b""
        while chunk := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            answer += chunk
        await leaving

    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["usage"]["completion_tokens"] == 2_000
    assert node.finished
