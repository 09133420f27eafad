"""Images of all three APIs at real vLLM servers with tiny models: answers are those of vLLM's own
chat endpoint, whatever path they take, and images are never mixed up.

They take minutes, so they run where PDCLUSTER_TEST_VLLM is set.
"""

import base64
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.client import MODEL, Json
from tests.system.cluster import Cluster, NewCluster
from tests.system.stock_vllm import FOLDER, LEASE_SECONDS, START_SECONDS, SWITCH, stock_engine
from tests.system.vision_models import make_llava, make_qwen, png
from tests.system.worker_process import WorkerProcess

RED, GREEN, BLUE = png(255, 0, 0), png(0, 255, 0), png(0, 0, 255)
DECODES = ("decode-0", "decode-1")
ROUTED: Json = {"decodeScore": {"allowRequestOverrides": True}}

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get(SWITCH) or not (FOLDER / ".ready").is_file(),
        reason=f"set {SWITCH}=1, after bench/peers/install_vllm.sh {FOLDER}",
    ),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def mixed(
    open_cluster: NewCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """One worker, with a model of LLaVA's form."""
    model = make_llava(tmp_path_factory.mktemp("llava"))
    with open_cluster("llava") as cluster:
        start(cluster, model, "mixed-0")
        yield cluster.workers["mixed-0"]


@pytest.fixture(scope="module")
def fleet(open_cluster: NewCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill and two decode workers, with a model of Qwen2-VL's form."""
    model = make_qwen(tmp_path_factory.mktemp("qwen"))
    with open_cluster("qwen") as cluster:
        start(cluster, model, "prefill-0", *DECODES)
        cluster.wait_connected()
        yield cluster


def start(cluster: Cluster, model: Path, *names: str) -> None:
    cluster.lease_seconds = LEASE_SECONDS
    for name in names:
        role = name.partition("-")[0]
        worker = cluster.add_worker(role, name, model=model, start=False)
        worker.settings["engine"] = stock_engine(model, role)
        worker.settings["model"]["frontend"] = "engine"
        worker.write_policy(ROUTED)
        worker.start()
    for worker in cluster.workers.values():
        worker.wait_ready(START_SECONDS)


def chat(*images: str, salt: str = "", before: int = 0, **fields: Any) -> Json:
    """before: words of text before the images."""
    parts = [{"type": "text", "text": "the fox " * (before // 2) + "what is "}]
    parts += [{"type": "image_url", "image_url": {"url": image}} for image in images]
    parts += [{"type": "text", "text": " over there? " + "think of the lazy dog " * 8}]
    given = {"cache_salt": salt} if salt else {}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
        **given,
        **fields,
    }


def ask(worker: WorkerProcess, request: Json, prefill: str = "auto", /, **route: Any) -> Json:
    reply = worker.client.http.post(
        "/v1/chat/completions",
        json={**request, "pdcluster": {"prefill": prefill, "route": route or None}},
        headers={"x-pdcluster-route": "1"},
    )
    assert reply.status_code == httpx.codes.OK, reply.text
    headers = {name: reply.headers[f"x-pdcluster-{name}"] for name in ("prefill", "route")}
    return {**reply.json(), **headers}


def post(worker: WorkerProcess, api: str, request: Json) -> Json:
    reply = worker.client.http.post(f"/v1/{api}", json=request)
    assert reply.status_code == httpx.codes.OK, reply.text
    answer: Json = reply.json()
    return answer


def streamed(worker: WorkerProcess, request: Json, prefill: str, /, **route: Any) -> Iterator[str]:
    fields = {"stream": True, "pdcluster": {"prefill": prefill, "route": route}}
    url = "/v1/chat/completions"
    with worker.client.http.stream("POST", url, json={**request, **fields}) as reply:
        assert reply.status_code == httpx.codes.OK, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    scores = choice["logprobs"] or {"content": []}
                    yield from (each["token"] for each in scores["content"])


def ask_vllm(worker: WorkerProcess, request: Json) -> Json:
    port = worker.settings["engine"]["vllm"]["port"]
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    reply = httpx.post(url, json={**request, "cache_salt": "own"}, timeout=60, trust_env=False)
    assert reply.status_code == httpx.codes.OK, reply.text
    answer: Json = reply.json()
    return answer


def tokens(answer: Json) -> list[str]:
    return [each["token"] for each in answer["choices"][0]["logprobs"]["content"]]


def cached(answer: Json) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.parametrize("images", [[RED], [BLUE], [RED, GREEN]], ids=["red", "blue", "two"])
def test_a_mixed_worker_answers_as_vllm_does(mixed, images):
    ours, theirs = ask(mixed, chat(*images)), ask_vllm(mixed, chat(*images))

    assert tokens(ours) == tokens(theirs)
    assert len(tokens(ours)) == 12
    assert ours["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]


def test_images_of_messages_and_responses_are_answered_as_those_of_a_chat(mixed):
    before, after = (part["text"] for part in chat(RED)["messages"][0]["content"][::2])
    given = {"model": MODEL, "temperature": 0}
    held = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
    blocks = [
        {"type": "text", "text": before},
        {"type": "image", "source": held},
        {"type": "text", "text": after},
    ]
    parts = [
        {"type": "input_text", "text": before},
        {"type": "input_image", "image_url": RED},
        {"type": "input_text", "text": after},
    ]
    user: Json = {"role": "user"}

    whole = ask(mixed, chat(RED, ignore_eos=False))
    message = post(
        mixed, "messages", {**given, "max_tokens": 12, "messages": [{**user, "content": blocks}]}
    )
    response = post(
        mixed,
        "responses",
        {**given, "max_output_tokens": 12, "input": [{**user, "content": parts}]},
    )

    text = whole["choices"][0]["message"]["content"]
    assert [block["text"] for block in message["content"]] == [text]
    assert [part["text"] for part in response["output"][0]["content"]] == [text]
    count = whole["usage"]["prompt_tokens"]
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == count
    assert response["usage"]["input_tokens"] == count


def test_a_prompt_s_scores_come_with_an_image(mixed):
    request = chat(RED, prompt_logprobs=1)
    ours, theirs = ask(mixed, request), ask_vllm(mixed, request)

    assert tokens(ours) == tokens(theirs)
    scores = [answer.get("prompt_logprobs") for answer in (ours, theirs)]
    assert len(scores[0]) == len(scores[1]) == ours["usage"]["prompt_tokens"]


@pytest.mark.parametrize("images", [[RED], [BLUE], [RED, GREEN]], ids=["red", "blue", "two"])
def test_a_remote_prefill_answers_as_a_local_one_and_as_vllm(fleet, images):
    decode = fleet.workers[DECODES[0]]
    before = decode.metrics()

    remote = ask(decode, chat(*images, salt="remote"), "remote", worker=decode.name)
    local = ask(decode, chat(*images, salt="local"), "local", worker=decode.name)

    assert (remote["prefill"], local["prefill"]) == ("remote", "local")
    decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    assert tokens(remote) == tokens(local) == tokens(ask_vllm(decode, chat(*images)))


@pytest.mark.parametrize("before", [0, 40])
def test_prefixes_of_two_images_are_never_one(fleet, before):
    decode = fleet.workers[DECODES[0]]
    requests = [chat(image, salt=f"apart-{before}", before=before) for image in (RED, BLUE)]

    answers = [ask(decode, each, "local", worker=decode.name) for each in (*requests, *requests)]

    assert tokens(answers[0]) == tokens(answers[2])
    assert tokens(answers[1]) == tokens(answers[3])
    assert tokens(answers[0]) != tokens(answers[1])
    shared = before // 32 * 32  # the text before them
    assert [cached(answer) for answer in answers[:2]] == [0, shared]
    assert min(cached(answer) for answer in answers[2:]) > shared + 32


def test_a_request_goes_to_the_worker_that_has_its_image(fleet):
    first, second = (fleet.workers[name] for name in DECODES)
    places, rounds = {RED: second.name, BLUE: first.name}, count()

    def follow() -> bool:
        """Place both images of a round, and compare where those of the round before go: each is
        asked for once, since a wrong worker has it from then on.
        """
        number = next(rounds)
        for image, name in places.items():
            here = chat(image, salt=f"routed-{number}", max_tokens=1)
            ask(first, here, "local", worker=name)
        found = {}
        for image in places:
            before = chat(image, salt=f"routed-{number - 1}", max_tokens=1)
            route = ask(first, before, "local", policy="prefixAware")["route"]
            found[image] = next(name for name in DECODES if f"worker={name}" in route)
        return found == places

    first.wait_for(follow, "each worker is known to have its image")


def test_a_stream_with_images_moves_on_a_drain(fleet):
    stays, drains = (fleet.workers[name] for name in DECODES)
    request = chat(RED, GREEN, max_tokens=600)
    whole = ask(stays, {**request, "cache_salt": "whole"}, worker=stays.name)
    before = stays.metrics()

    made = streamed(stays, request, "remote", worker=drains.name)
    begun = [next(made) for _ in range(5)]
    with fleet.drained_by_command(drains.name):
        assert [*begun, *made] == tokens(whole)
        fleet.wait_state(drains.name, "drained")

    stays.wait_growth(before, "kv_handovers_total", 1, outcome="ok")
    fleet.wait_state(drains.name, "ready")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("http://127.0.0.1:9/x.png", "no address is fetched here"),
        ("data:image/png;base64,!!!!", "the image is not base64"),
        (f"data:image/png;base64,{base64.b64encode(b'text').decode()}", "Failed to load image"),
    ],
)
def test_what_is_no_image_is_a_400(mixed, image, message):
    reply = mixed.client.http.post("/v1/chat/completions", json=chat(image))

    assert reply.status_code == httpx.codes.BAD_REQUEST, reply.text
    assert message in reply.json()["error"]["message"]
