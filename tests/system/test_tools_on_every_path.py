"""Calls of tools are the same ones by whatever way a request takes: prefill here or at a peer, a
router or another decode worker before the one that answers, streamed or whole.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.make_tiny_model import make_tiny_model
from tests.system.client import MODEL, Json
from tests.system.cluster import Cluster, NewCluster
from tests.system.worker_process import WorkerProcess

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if tools %}<tool_call> with arguments: {{ tools | tojson }}\n"
    "{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREFILL, INGRESS, PEER, ROUTER = (
    "tools-prefill-0",
    "tools-decode-0",
    "tools-decode-1",
    "tools-router-0",
)
CITIES = {"type": "string", "enum": ["Oslo", "Rome"]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": CITIES, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
            },
        },
    }
    for name in ("weather", "trains")
]
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": {"type": "function", "function": {"name": "trains"}},
    "auto": "auto",
}


@dataclass(frozen=True)
class Answer:
    """An answer; calls: names and arguments."""

    prefill: str
    tokens: list[int]
    content: str
    calls: list[tuple[str, str]]
    finish_reason: str


@pytest.fixture(scope="module")
def cluster(
    open_cluster: NewCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("texts"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with open_cluster("tools") as cluster:
        for name in (PREFILL, INGRESS, PEER, ROUTER):
            cluster.add_worker(name.split("-")[1], name, model=folder)
        cluster.wait_ready()
        for name, num_peers in ((ROUTER, 2), (INGRESS, 1)):
            worker = cluster.workers[name]
            worker.wait_for(
                lambda worker=worker, num_peers=num_peers: worker.num_decode_peers() == num_peers,
                f"{name} knows the decode workers",
            )
        yield cluster


def request(choice: str, prefill: str, *, stream: bool) -> Json:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"the {choice} fox jumps over the lazy dog"}],
        "tools": TOOLS,
        "tool_choice": CHOICES[choice],
        "parallel_tool_calls": False,
        "seed": 7,
        "max_tokens": 80,
        "return_token_ids": True,
        "pdcluster": {"prefill": prefill},
        "stream": stream,
    }


def ask(worker: WorkerProcess, choice: str, prefill: str, *, stream: bool) -> Answer:
    reply = worker.client.http.post(
        "/v1/chat/completions", json=request(choice, prefill, stream=stream)
    )
    assert reply.status_code == httpx.codes.OK, reply.text
    place = reply.headers["x-pdcluster-prefill"]
    return of_stream(place, reply.text) if stream else of_whole(place, reply.json()["choices"][0])


def of_whole(place: str, choice: Json) -> Answer:
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls") or ()
    ]
    return Answer(
        place,
        choice["token_ids"],
        choice["message"]["content"] or "",
        calls,
        choice["finish_reason"],
    )


def of_stream(place: str, text: str) -> Answer:
    tokens: list[int] = []
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    content, finish_reason = "", ""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            tokens += choice.get("token_ids") or []
            content += choice["delta"].get("content") or ""
            finish_reason = choice["finish_reason"] or finish_reason
            for call in choice["delta"].get("tool_calls") or ():
                number, function = call["index"], call["function"]
                names.setdefault(number, function.get("name", ""))
                arguments[number] = arguments.get(number, "") + (function.get("arguments") or "")
    calls = [(names[number], arguments[number]) for number in sorted(names)]
    return Answer(place, tokens, content, calls, finish_reason)


@pytest.mark.parametrize("choice", CHOICES)
def test_calls_are_the_same_on_every_path(cluster, choice):
    ingress, router = cluster.workers[INGRESS], cluster.workers[ROUTER]

    expected = ask(ingress, choice, "local", stream=False)
    answers = ask_by_all_ways([ingress, router], choice)
    with relaying(cluster):
        answers += ask_by_all_ways([ingress], choice)

    assert expected.tokens
    for place, answer in answers:
        assert answer == replace(expected, prefill=place)
    if choice == "auto":
        return
    [(name, arguments)] = expected.calls
    assert name in (("trains",) if choice == "named" else ("weather", "trains"))
    assert json.loads(arguments).keys() == {"city", "days"}
    assert json.loads(arguments)["city"] in CITIES["enum"]


def ask_by_all_ways(workers: list[WorkerProcess], choice: str) -> list[tuple[str, Answer]]:
    return [
        (place, ask(worker, choice, place, stream=stream))
        for worker in workers
        for place in ("local", "remote")
        for stream in (False, True)
    ]


@contextmanager
def relaying(cluster: Cluster) -> Iterator[None]:
    """The ingress is drained within the block, so that its peer makes all tokens."""
    ingress, peer = cluster.workers[INGRESS], cluster.workers[PEER]
    with cluster.drained_by_command(INGRESS):
        cluster.wait_state(INGRESS, "drained")
        before, made = ingress.metrics(), peer.metrics()
        yield
        peer.wait_for(
            lambda: peer.growth(made, "generation_tokens_total") > 0, "the peer made tokens"
        )
        assert ingress.growth(before, "generation_tokens_total") == 0
    ingress.wait_ready()
