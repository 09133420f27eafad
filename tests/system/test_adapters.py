"""LoRA adapters of our own engine: answers are those of the model with their weights added,
whatever path a request takes, prefixes are an adapter's own, and a wrong one is said at the start.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import PROJECTIONS, make_adapter
from tests.reference import Reference
from tests.system.cluster import NewCluster, Pair

NAMES = ("sql", "fr")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Adapters, each beside the model to which it is added."""
    home = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        merged = home / f"{name}-merged"
        make_adapter(tiny_model, home / name, seed=seed, targets=PROJECTIONS, merged=merged)
    return home


@pytest.fixture(scope="module")
def adapted_pair(open_cluster: NewCluster, folders: Path) -> Iterator[Pair]:
    with open_cluster("adapters") as cluster:
        workers = []
        for role in ("prefill", "decode"):
            worker = cluster.add_worker(role, f"adapters-{role}-0", start=False)
            worker.settings["model"] |= {
                "adapters": [*NAMES],
                "adapterPaths": {name: str(folders / name) for name in NAMES},
            }
            worker.start()
            workers.append(worker)
        cluster.wait_ready()
        yield Pair(cluster, *workers)


def test_adapters_answer_by_their_weights_on_every_path(adapted_pair, tiny_model, folders, prompts):
    client, prompt = adapted_pair.decode.client, prompts(100)
    models = {"tiny": tiny_model} | {name: folders / f"{name}-merged" for name in NAMES}
    answers = {
        (name, place): client.complete(prompt, place, model=name)
        for name in models
        for place in ("remote", "local")
    }
    assert [answer.prefill for answer in answers.values()] == ["remote", "local"] * 3
    for name, folder in models.items():
        assert answers[name, "remote"].tokens == answers[name, "local"].tokens
        Reference(folder).check(prompt, answers[name, "remote"].tokens)
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 3


def test_prefixes_of_an_adapter_are_its_own(adapted_pair, prompts):
    client, prompt = adapted_pair.decode.client, prompts(200)
    names = ("tiny", *NAMES)
    cached = [
        client.complete(prompt, "local", model=name).cached_tokens for name in (*names, *names)
    ]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= 160


def test_adapters_are_listed_and_others_are_none(adapted_pair, prompts):
    client = adapted_pair.decode.client
    listed = client.http.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        ("tiny", None),
        *((name, "tiny") for name in NAMES),
    ]
    refused = client.post({"model": "law", "prompt": prompts(3), "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_a_worker_with_other_weights_of_an_adapter_is_no_peer(
    new_cluster: NewCluster, folders, prompts
):
    cluster = new_cluster("other-adapters")
    workers = []
    for role, folder in (("prefill", "sql"), ("decode", "fr")):
        worker = cluster.add_worker(role, f"other-{role}", start=False)
        worker.settings["model"] |= {
            "adapters": ["sql"],
            "adapterPaths": {"sql": str(folders / folder)},
        }
        worker.start()
        workers.append(worker)
    for worker in workers:
        worker.wait_ready()
    target = workers[1]
    target.wait_for(
        lambda: target.metrics().value("peer_refused_total", reason="weights") == 1,
        "the refused pair",
    )
    assert target.client.complete(prompts(100), model="sql").prefill == "local"
    assert "same model files and adapters" in target.log_tail(200)
