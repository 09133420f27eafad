"""Answers that do not end in the time that a process has before SIGKILL end with an error."""

import asyncio
import json
from math import inf

import pytest

from pdcluster_worker.processes import lifecycle
from tests.worker.server.http.leaving_node import BODY, DEADLINE_SECONDS, LeavingNode

TEXT = "this worker was stopped, and has no time left for this answer: send it again"
PATHS = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "stream": True},
    "/v1/messages": {**BODY, "max_tokens": 50},
    "/v1/responses": {"model": "tiny", "input": "Hi", "stream": True},
}


class HeldNode(LeavingNode):
    """A node whose requests do not end."""

    def __init__(self) -> None:
        super().__init__()
        self.hold()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(lifecycle, "LOOK_SECONDS", 0.01)


async def ended(rig, server, wire, path, body):
    """The answer to a request that is open when the time is over."""
    node = HeldNode()
    async with asyncio.timeout(DEADLINE_SECONDS):
        asking = asyncio.create_task(wire.post(path, json=body))
        await rig.backend.holding.wait()
        leaving = asyncio.create_task(lifecycle.leave(node, server))
        node.seconds_left = 0
        answer = await asking
        await rig.backend.cancelled.wait()  # its engine makes no more tokens of it
        await leaving
    assert node.finished
    return answer


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_ends_with_an_error_event(rig, server, wire, path):
    rig.backend.hold_after = 3
    answer = await ended(rig, server, wire, path, PATHS[path])

    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    found = json.dumps(events[-2:])
    assert TEXT in found
    assert ("overloaded_error" if path == "/v1/messages" else '"draining"') in found


@pytest.mark.parametrize("hold_after", [0, 3])
async def test_a_whole_answer_and_one_without_a_token_are_refused_and_may_be_sent_again(
    rig, server, wire, hold_after
):
    rig.backend.hold_after = hold_after
    body = {**BODY, "stream": hold_after == 0}
    answer = await ended(rig, server, wire, "/v1/chat/completions", body)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"] == {
        "message": TEXT,
        "type": "server_error",
        "param": None,
        "code": "draining",
    }


async def test_a_request_that_comes_when_the_time_is_over_is_refused(rig, http):
    rig.open_answers.end(lifecycle._no_time_left)
    answer = await http.post("/v1/chat/completions", json=BODY)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_a_client_that_leaves_at_that_moment_leaves_nothing_behind(rig, server, wire):
    rig.backend.hold_after = 3
    node = HeldNode()
    async with asyncio.timeout(DEADLINE_SECONDS):
        async with wire.stream("POST", "/v1/chat/completions", json=BODY):
            await rig.backend.holding.wait()
            node.seconds_left = 0
        await lifecycle.leave(node, server)
        await rig.backend.cancelled.wait()
    assert server.num_answering == 0


async def test_the_time_that_is_left_may_become_less_while_requests_end(rig, server, wire, until):
    """An eviction with a short grace period, of a pod that ends already."""
    rig.backend.hold_after = 3
    node = HeldNode()
    async with asyncio.timeout(DEADLINE_SECONDS):
        asking = asyncio.create_task(wire.post("/v1/chat/completions", json=BODY))
        await rig.backend.holding.wait()
        leaving = asyncio.create_task(lifecycle.leave(node, server))
        await until(lambda: node.num_leaves == 1)
        assert node.seconds_left == inf
        assert not asking.done()
        node.seconds_left = 0
        assert TEXT in (await asking).text
        await leaving
