"""Two clusters of this machine behind one address: each model by its name, the smaller one in
place of a refusal, and both at once.
"""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from tests.make_tiny_model import make_tiny_model
from tests.system.pdctl import up
from tests.system.waiting import wait_for

CHAT = "/v1/chat/completions"
SMALL = {
    "model": {"name": "small"},
    "roles": {"mixed": {"pools": [{"name": "cpu", "replicas": 1}]}},
}
LARGE = {
    "model": {"name": "large"},
    "roles": {
        "router": {"pools": [{"name": "cpu", "replicas": 1}]},
        "mixed": {"pools": [{"name": "cpu", "replicas": 1}]},
    },
    "service": {"models": [{"name": "small", "cluster": "small"}]},
    "engine": {"maxSequences": 1, "schedulingPolicy": "priority"},
    "qos": {
        "allowClientPriority": True,
        "admission": {"maxQueuedRequests": 3},
        "degradation": {"smallerModel": {"name": "small"}},
    },
    "routing": {"racing": {"models": True, "maxRatio": 1.0}},
}


def write(folder: Path, name: str, spec: dict[str, Any], seed: int) -> str:
    spec["model"]["path"] = str(make_tiny_model("llama-heavy", folder / f"model-{name}", seed))
    document = {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": name},
        "spec": spec,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[httpx.Client]:
    with serving(folder, "small", SMALL, 1) as client:
        yield client


@pytest.fixture(scope="module")
def large(folder: Path, small: httpx.Client) -> Iterator[httpx.Client]:
    with serving(folder, "large", LARGE, 2) as client:
        yield client


@contextmanager
def serving(folder: Path, name: str, spec: dict[str, Any], seed: int) -> Iterator[httpx.Client]:
    """A client of `pdctl up` of a cluster; all share the folder of their states."""
    file, state = write(folder, name, spec, seed), ("--state-dir", str(folder / "state"))
    output = folder / f"{name}.output"
    with (
        up(file, *state, output=output, environment=os.environ) as address,
        httpx.Client(base_url=address, timeout=300, trust_env=False) as client,
    ):
        yield client


def ask(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "the quick fox"}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    return client.post(CHAT, json=body)


def hold(client: httpx.Client, release: Event) -> str:
    """The model of a long answer that is read until `release`, or the code of its refusal."""
    messages = [{"role": "user", "content": "the quick fox"}]
    body = {"model": "large", "messages": messages, "max_tokens": 1900, "ignore_eos": True}
    with client.stream("POST", CHAT, json={**body, "stream": True}) as reply:
        if reply.is_error:
            reply.read()
            code: str = reply.json()["error"]["code"]
            return code
        events = (line for line in reply.iter_lines() if line.startswith("data: {"))
        model: str = json.loads(next(events).removeprefix("data: "))["model"]
        for _ in events:
            if release.is_set():
                break
        return model


def text(answer: httpx.Response) -> str:
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def test_each_model_answers_by_its_name(large: httpx.Client, small: httpx.Client) -> None:
    own, other, direct = ask(large, "large"), ask(large, "small"), ask(small, "small")

    assert [own.json()["model"], other.json()["model"]] == ["large", "small"]
    assert text(other) == text(direct) != text(own)
    listed = large.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed][:2] == ["large", "small"]
    assert ask(small, "large").json()["error"]["code"] == "model_not_found"


def test_the_smaller_model_answers_while_the_large_one_is_full(
    large: httpx.Client, small: httpx.Client
) -> None:
    expected = text(ask(small, "small"))
    before = ask(large, "large", priority="low")
    assert (before.json()["model"], before.headers.get("x-pdcluster-model")) == ("large", None)

    release = Event()
    with ThreadPoolExecutor(8) as clients:  # one runs, three wait, one is refused
        long = [clients.submit(hold, large, release) for _ in range(5)]
        try:
            wait_for(lambda: any(each.done() for each in long), 60, "the queue is full")
            low = ask_low(large)
            normal, kept = ask(large, "large"), ask_low(large, pdcluster={"smaller_model": False})
            refused = [each.result() for each in long if each.done()]
        finally:
            release.set()
        held = [each.result() for each in long if each.result() != "queue_full"]

    assert (low.status_code, low.json()["model"], text(low)) == (200, "small", expected)
    assert low.json()["pdcluster"] == {"degraded": ["model=small"]}
    assert low.headers["x-pdcluster-model"] == "small"
    assert {each.json()["error"]["code"] for each in (normal, kept)} == {"queue_full"}
    assert (refused, held) == (["queue_full"], ["large"] * 4)


def test_one_of_two_models_wins_a_race(large: httpx.Client, small: httpx.Client) -> None:
    expected = {"large": text(ask(large, "large")), "small": text(ask(small, "small"))}

    answers = [ask(large, "large", pdcluster={"race": "small"}) for _ in range(4)]

    assert {each.status_code for each in answers} == {200}
    for each in answers:
        model = each.json()["model"]
        assert text(each) == expected[model]
        assert (each.headers.get("x-pdcluster-model") == "small") == (model == "small")
    # counted once the answer has gone
    wait_for(lambda: races(large) == len(answers), 10, lambda: races(large))


def races(client: httpx.Client) -> int:
    counted = re.findall(r"^pdcluster_races_total{.*} (\d+)", client.get("/metrics").text, re.M)
    return sum(map(int, counted))


def ask_low(client: httpx.Client, **fields: Any) -> httpx.Response:
    return ask(client, "large", priority="low", **fields)


def test_a_cluster_that_ends_and_comes_back_is_refused_and_served_again(
    folder: Path, large: httpx.Client
) -> None:
    later = {"name": "later", "cluster": "later"}
    file = folder / "large.yaml"
    document = yaml.safe_load(file.read_text())
    document["spec"]["service"]["models"].append(later)
    file.write_text(yaml.safe_dump(document))
    wait_for(lambda: ask(large, "later").status_code == 503, 30, "the edit is in force")
    assert ask(large, "later").json()["error"]["code"] == "model_unavailable"

    spec = {**SMALL, "model": {"name": "later"}}
    with serving(folder, "later", spec, 3):
        wait_for(lambda: ask(large, "later").status_code == 200, 30, "later is found")

    wait_for(lambda: ask(large, "later").status_code == 503, 30, "later is gone")
