"""The last moments of a server process: a request that came just before the listener closed is not
cut off.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from pdcluster_worker.processes import lifecycle as process_life
from pdcluster_worker.processes import server_process
from pdcluster_worker.server.http import run
from pdcluster_worker.server.http.connection import HttpConnection
from pdcluster_worker.server.http.run import HttpServer
from pdcluster_worker.serving import draining
from pdcluster_worker.serving.draining import DrainController
from tests.worker.server.http.leaving_node import BODY, DEADLINE_SECONDS, LeavingNode

LONG = {**BODY, "stream": False, "logprobs": True, "top_logprobs": 20, "max_tokens": 2_000}
"""Its answer is far larger than the kernel's buffers."""
BEGUN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
    b"application/json\r\ncontent-length: 1000\r\n\r\n{"
)
"""A request that is not here whole."""
NUM_UNTAKEN = 8_000
"""Tokens, and bytes, of an answer that fits into the server's buffer in the kernel and not into
that of a `deaf` client.
"""


class DrainingNode:
    """A node of a real drain, whose clients are those of the server; counts how often it looked at
    them.
    """

    def __init__(self, server: HttpServer) -> None:
        self.states: list[str] = []
        self.num_looks = 0
        self.num_requests = 0
        self.finished = False
        self.slips_in: list[Callable[[], Awaitable[None]]] = []
        self.drain = DrainController(lambda: self.num_requests, self.states.append, self._poll)
        self.seconds_left = inf
        self._server = server

    @property
    def is_drained(self) -> bool:
        return self.drain.state == "drained"

    async def leave(self) -> None:
        self.drain.end()
        await self.drain.drained()
        while self.slips_in:
            await self.slips_in.pop()()

    async def finish(self) -> None:
        await self.drain.drained()
        self.finished = True

    async def _poll(self) -> frozenset[str]:
        self.num_looks += 1
        return await self._server.unacked()


class Slow:
    """A client that has asked for NUM_UNTAKEN tokens and reads nothing of its whole answer until
    `read` is called.
    """

    def __init__(self, rig, server, deaf, until) -> None:
        rig.backend.max_model_len = 1 << 30
        rig.backend.script = lambda spec: [104] * NUM_UNTAKEN
        self._rig, self._server, self._deaf, self._until = rig, server, deaf, until

    async def ask(self) -> None:
        self._sock = await self._deaf({**BODY, "stream": False, "max_tokens": NUM_UNTAKEN})
        metric = "pdcluster_request_success_total"
        await self._until(
            lambda: (
                self._rig.value(metric, finish_reason="length") == 1
                and not self._server.num_answering
            )
        )

    async def read(self) -> dict[str, object]:
        answer = b""
        while not is_whole(answer):
            chunk = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 20)
            assert chunk, f"the answer ends after {len(answer)} bytes"
            answer += chunk
        return json.loads(answer.partition(b"\r\n\r\n")[2])


async def read_all(sock: socket.socket) -> bytes:
    answer = b""
    while chunk := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
        answer += chunk
    return answer


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    return bool(end) and f"content-length: {len(body)}".encode() in head.lower()


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(process_life, "HTTP_DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(server_process, "HTTP_DRAIN_SECONDS", 0.05)
    monkeypatch.setattr(draining, "UNSENT_CHECK_SECONDS", 0.01)


@pytest.fixture
async def node(server):
    node = DrainingNode(server)
    yield node
    await node.drain.close()


@pytest.fixture(params=[False, True], ids=["kept", "closed"])
def slow(request, rig, server, deaf, until):
    """On a connection that the server keeps, or has closed."""
    rig.backend.drains = request.param
    return Slow(rig, server, deaf, until)


async def test_a_stream_that_slipped_in_is_waited_for(rig, server, wire, until):
    node = LeavingNode()
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        leaving = asyncio.create_task(process_life.leave(node, server))
        await until(lambda: node.num_leaves == 1)
        node.hold()  # as a request does that comes now
        # the time for last bytes is over, and the request is not
        await until(lambda: node.num_leaves == 2)
        assert not leaving.done()
        rig.backend.gate.set()
        answer = await asking
        node.idle.set()
        await leaving

    assert answer.text.endswith("data: [DONE]\n\n")
    assert node.finished


async def test_an_answer_through_a_worker_whose_engine_was_killed_comes_whole(
    rig, server, wire, until
):
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        ending = asyncio.create_task(server_process._let_relayed_end(server, asyncio.Future()))
        await until(lambda: not listens(server.port))
        await until(lambda: server.num_answering == 1)
        assert not ending.done()
        rig.backend.gate.set()
        answer = await asking
        await ending

    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("is_hurried", [True, False])
async def test_an_answer_through_a_worker_whose_engine_was_killed_holds_it_within_bounds(
    rig, server, wire, monkeypatch, is_hurried
):
    monkeypatch.setattr(server_process, "RELAYED_SECONDS", 3600.0 if is_hurried else 0.05)
    rig.backend.hold_after = 3
    asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
    hurried = asyncio.Future()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await rig.backend.holding.wait()
        if is_hurried:
            hurried.set_result(None)
        await server_process._let_relayed_end(server, hurried)
        assert not asking.done()
        rig.backend.gate.set()
        await asking


async def test_nothing_but_answers_holds_a_worker_whose_engine_was_killed(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(BEGUN)
    await writer.drain()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await server_process._let_relayed_end(server, asyncio.Future())
        await server.close()
        assert await reader.read() == b""
    writer.close()


async def test_a_request_that_is_still_on_its_way_here_does_not_hold_the_end(server):
    node = LeavingNode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(BEGUN)
    await writer.drain()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await process_life.leave(node, server)
        assert await reader.read() == b""
    writer.close()

    assert (node.finished, server.finished.done()) == (True, True)


async def test_a_client_that_reads_slowly_gets_the_whole_answer(rig, server, deaf, until):
    node = LeavingNode()
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [104] * 2_000
    sock = await deaf(LONG)
    async with asyncio.timeout(DEADLINE_SECONDS * 4):
        await until(
            lambda: rig.value("pdcluster_request_success_total", finish_reason="length") == 1
        )
        leaving = asyncio.create_task(process_life.leave(node, server))
        # the time for what is open beside requests is over
        await until(lambda: node.num_leaves >= 3)
        answer = await read_all(sock)
        await leaving

    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["usage"]["completion_tokens"] == 2_000
    assert node.finished


async def test_a_worker_has_not_drained_before_its_clients_have_taken_their_answers(
    node, slow, server, until
):
    """A pod's network goes with it, and with it what the kernel holds."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        await slow.ask()
        leaving = asyncio.create_task(process_life.leave(node, server))
        await until(lambda: leaving.done() or node.num_looks >= 3)
        assert (node.drain.state, node.drain.num_holding, server.finished.done()) == (
            "draining",
            1,
            False,
        )
        answer = await slow.read()
        await leaving

    assert answer["usage"]["completion_tokens"] == NUM_UNTAKEN
    assert (node.states, node.finished) == (["draining", "drained"], True)


async def test_the_end_waits_for_the_client_of_a_request_that_slipped_in(node, slow, server, until):
    async def slip_in() -> None:
        node.num_requests = 1
        node.drain.poll()
        await slow.ask()
        node.num_requests = 0

    node.slips_in.append(slip_in)
    async with asyncio.timeout(DEADLINE_SECONDS):
        leaving = asyncio.create_task(process_life.leave(node, server))
        await until(lambda: leaving.done() or (server.finished.done() and node.num_looks >= 3))
        assert (leaving.done(), node.finished) == (False, False)
        answer = await slow.read()
        await leaving

    assert answer["usage"]["completion_tokens"] == NUM_UNTAKEN
    assert node.finished


async def test_the_end_of_a_drained_worker_does_not_wait_for_clients_it_answered_meanwhile(
    node, slow, server
):
    """A refusal, or metrics: nothing of what a drained worker says was promised."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        node.drain.command(True)
        await node.drain.drained()
        await slow.ask()
        assert await server.unacked()
        await process_life.leave(node, server)

    assert (node.states, node.finished) == (["draining", "drained"], True)


async def test_a_client_that_took_nothing_while_a_request_ran_is_not_waited_for_again(
    node, slow, server, until, monkeypatch
):
    monkeypatch.setattr(draining, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(run, "STALLED_SECONDS", 0.3)
    node.num_requests = 1
    async with asyncio.timeout(DEADLINE_SECONDS):
        await slow.ask()
        node.drain.command(True)
        await until(lambda: node.num_looks)
        while await server.unacked():
            await asyncio.sleep(0.01)
        assert node.drain.state == "draining"
        num_looks, node.num_requests = node.num_looks, 0
        await node.drain.drained()

    assert node.num_looks <= num_looks + 1


async def test_a_whole_request_is_waited_for_though_another_comes_behind_it_on_its_connection(
    rig, server, until
):
    rig.backend.hold_after = 0
    content = json.dumps({**BODY, "stream": False}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
        b"application/json\r\ncontent-length: %d\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(DEADLINE_SECONDS):
        writer.write(head % len(content) + content + head % 1000)
        await rig.backend.holding.wait()
        assert (server.num_answering, len(await server.unacked())) == (1, 1)
        rig.backend.gate.set()
        assert b"200 OK" in await reader.readline()
        await until(lambda: server.num_answering == 0)  # the second is not here whole
    writer.close()


async def test_a_client_that_stopped_reading_is_waited_for_once(
    node, rig, server, deaf, monkeypatch, caplog, until
):
    """Its connection is aborted, and what the kernel then holds has not moved since before."""
    monkeypatch.setattr(HttpConnection, "send_seconds", 1.0)
    monkeypatch.setattr(run, "STALLED_SECONDS", 2.0)
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [104] * 2_000
    async with asyncio.timeout(DEADLINE_SECONDS * 3):
        await deaf(LONG)
        await until(
            lambda: rig.value("pdcluster_request_success_total", finish_reason="length") == 1
        )
        leaving = asyncio.create_task(process_life.leave(node, server))
        await until(lambda: "client stopped reading" in caplog.text)
        since, num_looks = set(), node.num_looks
        await until(
            lambda: (
                since.update(since for _, since in server._unsent._held.values()) or leaving.done()
            )
        )
        await leaving

    assert node.num_looks > num_looks
    assert len(since) == 1
    assert "no longer waiting for" in caplog.text
    assert node.finished
