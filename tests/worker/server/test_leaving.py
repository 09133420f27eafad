"""The last moments of a server process: a request that came just before the listener closed is not cut off."""

import asyncio
import json
import socket

import pytest

from pdcluster_worker import server_process
from pdcluster_worker.dispatch import draining
from pdcluster_worker.dispatch.draining import Drain
from pdcluster_worker.server.run import HttpServer

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
DEADLINE_SECONDS = 10
LONG = {**BODY, "stream": False, "logprobs": True, "top_logprobs": 20, "max_tokens": 2_000}
"""Its answer is far larger than the kernel's buffers."""
NUM_UNTAKEN = 8_000
"""Tokens, and bytes, of an answer that fits into the server's buffer in the kernel and not into that of a `deaf` client."""


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


class Untaken:
    """A whole answer of which the kernel has taken all and the client nothing; counts how often somebody looks at it."""

    def __init__(self, server: HttpServer, sock: socket.socket) -> None:
        self.num_looks = 0
        self._num_unsent = server.num_unsent
        self._sock = sock

    async def num_unsent(self) -> int:
        self.num_looks += 1
        return await self._num_unsent()

    async def read(self) -> dict[str, object]:
        """The client takes it."""
        answer = b""
        while not is_whole(answer):
            chunk = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 20)
            assert chunk, f"the answer ends after {len(answer)} bytes"
            answer += chunk
        return json.loads(answer.partition(b"\r\n\r\n")[2])


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    return bool(end) and f"content-length: {len(body)}".encode() in head.lower()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(server_process, "HTTP_DRAIN_SECONDS", 0.05)
    for module in (server_process, draining):
        monkeypatch.setattr(module, "UNSENT_CHECK_SECONDS", 0.01)


@pytest.fixture(params=[False, True], ids=["kept", "closed"])
async def untaken(request, rig, server, deaf, until, monkeypatch):
    """On a connection that the server keeps, or has closed."""
    rig.backend.drains = request.param
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [104] * NUM_UNTAKEN
    untaken = Untaken(server, await deaf({**BODY, "stream": False, "max_tokens": NUM_UNTAKEN}))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await until(lambda: rig.value("pdcluster_request_success_total", finish_reason="length") == 1 and not server.num_answering)
    monkeypatch.setattr(server, "num_unsent", untaken.num_unsent)
    return untaken


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


async def test_a_request_that_is_still_on_its_way_here_does_not_hold_the_end(server):
    node = LeavingNode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await server_process._leave(node, server)
        assert await reader.read() == b""
    writer.close()

    assert (node.finished, server.finished.done()) == (True, True)


async def test_a_client_that_reads_slowly_gets_the_whole_answer(rig, server, deaf, until):
    node = LeavingNode()
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [104] * 2_000
    sock = await deaf(LONG)
    async with asyncio.timeout(DEADLINE_SECONDS * 4):
        await until(lambda: rig.value("pdcluster_request_success_total", finish_reason="length") == 1)
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


async def test_the_end_waits_for_a_client_that_has_not_taken_its_answer(server, untaken, until):
    """For the network of a pod goes with it, and what the kernel holds."""
    node = LeavingNode()
    async with asyncio.timeout(DEADLINE_SECONDS):
        leaving = asyncio.create_task(server_process._leave(node, server))
        await until(lambda: leaving.done() or untaken.num_looks >= 3)
        assert (server.finished.done(), leaving.done(), node.finished) == (True, False, False)
        answer = await untaken.read()
        await leaving

    assert answer["usage"]["completion_tokens"] == NUM_UNTAKEN
    assert node.finished


async def test_a_worker_has_not_drained_before_its_clients_have_taken_their_answers(untaken, until):
    states = []
    drain = Drain(lambda: 0, states.append, untaken.num_unsent)
    async with asyncio.timeout(DEADLINE_SECONDS):
        drain.command(True)
        await until(lambda: drain.state == "drained" or untaken.num_looks >= 3)
        assert (drain.state, drain.num_holding) == ("draining", 1)
        answer = await untaken.read()
        await drain.drained()

    await drain.close()
    assert answer["usage"]["completion_tokens"] == NUM_UNTAKEN
    assert states == ["draining", "drained"]


async def test_a_request_that_is_here_whole_counts_before_its_answer_begins(rig, server, wire, until):
    """Between the last token and the first byte of a whole answer nothing else knows of it."""
    rig.backend.hold_after = 0
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        assert await server.num_unsent() == 1
        rig.backend.gate.set()
        await asking
        while await server.num_unsent():
            await asyncio.sleep(0.01)
