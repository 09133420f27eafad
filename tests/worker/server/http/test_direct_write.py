"""Events of a stream that go straight to its connection: the same ones, in the same order."""

import asyncio
import json
import re
import socket
from string import ascii_lowercase

import pytest

from pdcluster_worker.server.http.connection import HttpConnection
from pdcluster_worker.server.http.raw_http import DirectWriter

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}


@pytest.fixture
def script(rig):
    rig.backend.script = lambda spec: [byte - ord("!") for byte in b"abcdef"]
    return rig.backend


def text_of(answer):
    lines = [line[len("data: ") :] for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return [chunk["choices"][0]["delta"].get("content") for chunk in chunks]


async def whole_of(sock):
    """All bytes of an answer in chunks."""
    loop, answer = asyncio.get_running_loop(), bytearray()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    while not answer.endswith(b"0\r\n\r\n"):
        answer += await loop.sock_recv(sock, 1 << 20)
    return bytes(answer)


async def test_events_between_the_first_and_the_last_go_by_the_door(script, wire):
    answer = await wire.post(CHAT, json={**BODY, "stream": True})

    assert "".join(part or "" for part in text_of(answer)) == "abcdef"
    assert script.num_taken == 4


@pytest.mark.parametrize("more", [{"n": 2}, {"stop": ["zzz"]}, {"stream": False}])
async def test_only_a_lone_streamed_choice_that_no_string_may_stop_goes_by_it(script, wire, more):
    answer = await wire.post(CHAT, json={**BODY, "stream": True, **more})

    assert answer.status_code == 200
    assert script.num_taken == 0


async def test_a_second_answer_on_the_connection_follows_the_first(script, wire):
    texts = [text_of(await wire.post(CHAT, json={**BODY, "stream": True})) for _ in range(2)]

    assert texts[0] == texts[1]
    assert script.num_taken == 8


async def test_events_that_go_by_the_door_are_timed_and_counted(rig, script, wire):
    options = {"stream_options": {"include_usage": True}}
    answer = await wire.post(CHAT, json={**BODY, "stream": True, **options})
    last = json.loads(answer.text.split("\n\n")[-3][len("data: ") :])

    assert (script.num_taken, last["usage"]["completion_tokens"]) == (4, 6)
    assert rig.value("pdcluster_inter_token_latency_seconds_count") == 5


NUM_LATE = 4_000
"""Tokens whose events, with log probabilities, are more than the kernel's buffers hold."""


async def test_a_client_that_reads_late_gets_the_events_in_their_order(rig, deaf, monkeypatch):
    text = (ascii_lowercase * NUM_LATE)[:NUM_LATE]
    rig.backend.max_model_len = 1 << 30
    rig.backend.script = lambda spec: [byte - ord("!") for byte in text.encode()]
    is_full, pause = asyncio.Event(), HttpConnection.pause_writing
    monkeypatch.setattr(
        HttpConnection, "pause_writing", lambda connection: (pause(connection), is_full.set())
    )
    many = {"max_tokens": NUM_LATE, "logprobs": True, "top_logprobs": 20}
    async with asyncio.timeout(30):
        sock = await deaf({**BODY, "stream": True, **many})
        await is_full.wait()
        answer = await whole_of(sock)
    parts = [json.loads(event)["choices"][0] for event in re.findall(rb"data: (\{.*)\n\n", answer)]

    assert "".join(part["delta"].get("content") or "" for part in parts) == text
    assert 0 < rig.backend.num_taken < NUM_LATE - 2  # the first and the last never go by it


def test_door_does_not_hold_its_answer_and_closes_with_it():
    class Answer:
        """Holds nothing."""

    answer = Answer()
    direct_writer = DirectWriter(answer)
    del answer

    assert not direct_writer.is_open
