"""A LoRA adapter of stock vLLM servers: its answers are those of the model with its weights added,
whatever path they take, and its prefixes are never the model's.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import make_adapter
from tests.reference import Reference
from tests.system.cluster import NewCluster, Pair
from tests.system.stock_vllm import (
    FOLDER,
    LEASE_SECONDS,
    START_SECONDS,
    SWITCH,
    make_wide_model,
    stock_engine,
    wait_ready,
)

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get(SWITCH) or not (FOLDER / ".ready").is_file(),
        reason=f"set {SWITCH}=1, after bench/peers/install_vllm.sh {FOLDER}",
    ),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, wide_model: Path) -> tuple[Path, Path]:
    """The adapter, and the merged model."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(wide_model, folder / "sql", merged=folder / "merged")
    return folder / "sql", folder / "merged"


@pytest.fixture(scope="module")
def adapted_pair(
    open_cluster: NewCluster, wide_model: Path, folders: tuple[Path, Path]
) -> Iterator[Pair]:
    with open_cluster("adapted") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        workers = []
        for role in ("prefill", "decode"):
            worker = cluster.add_worker(role, f"adapted-{role}-0", model=wide_model, start=False)
            engine = stock_engine(wide_model, role)
            engine["vllm"]["command"] += ["--enable-lora", "--lora-modules", f"sql={folders[0]}"]
            worker.settings["engine"] = engine
            worker.settings["model"]["adapters"] = ["sql"]
            worker.start()
            workers.append(worker)
        pair = Pair(cluster, *workers)
        wait_ready(pair)
        yield pair


def test_an_adapter_answers_by_its_weights_on_every_path(
    adapted_pair, wide_model, folders, prompts
):
    client, prompt = adapted_pair.decode.client, prompts(100)

    answers = {
        (name, place): client.complete(prompt, place, model=name)
        for name in ("tiny", "sql")
        for place in ("remote", "local")
    }

    assert [answer.prefill for answer in answers.values()] == ["remote", "local"] * 2
    for name, folder in (("tiny", wide_model), ("sql", folders[1])):
        remote, local = answers[name, "remote"], answers[name, "local"]
        assert remote.tokens == local.tokens
        Reference(folder).check(prompt, remote.tokens)
    assert answers["tiny", "local"].tokens != answers["sql", "local"].tokens


def test_prefixes_of_an_adapter_are_its_own(adapted_pair, prompts):
    client, prompt = adapted_pair.decode.client, prompts(200)

    cached = [
        client.complete(prompt, "local", model=name).cached_tokens
        for name in ("tiny", "sql", "tiny", "sql")
    ]

    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 160
