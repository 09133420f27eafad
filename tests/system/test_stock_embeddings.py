"""Embeddings of a real vLLM through a mixed worker and a router.

It takes minutes, so it runs where PDCLUSTER_TEST_VLLM is set.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from tests.system.client import MODEL
from tests.system.cluster import NewCluster
from tests.system.stock_vllm import (
    LEASE_SECONDS,
    MAX_MODEL_LEN,
    NOT_ASKED,
    START_SECONDS,
    installed,
    make_wide_model,
    stock_engine,
)
from tests.system.worker_process import WorkerProcess

PATH = "/v1/embeddings"
AS_EMBEDDING = ("--runner", "pooling", "--convert", "embed")

pytestmark = [
    pytest.mark.skipif(not installed(), reason=NOT_ASKED),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def workers(open_cluster: NewCluster, model: Path) -> Iterator[list[WorkerProcess]]:
    """A mixed worker and a router."""
    with open_cluster("embeddings") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        mixed = cluster.add_worker("mixed", "embeddings-0", model=model, start=False)
        mixed.settings["engine"] = stock_engine(model, "mixed")
        mixed.settings["engine"]["vllm"]["command"] += AS_EMBEDDING
        router = cluster.add_worker("router", "embeddings-router-0", model=model, start=False)
        router.settings["engine"] = {"type": "vllm"}
        for worker in (mixed, router):
            worker.settings["model"]["frontend"] = "engine"
            worker.start()
        for worker in (mixed, router):
            worker.wait_ready(START_SECONDS)
        yield [mixed, router]


def expected(model: Path, token_ids: list[int]) -> list[float]:
    """The last token's state, normalized, as vLLM converts a model that generates text."""
    module = AutoModel.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        state = module(torch.tensor([token_ids])).last_hidden_state[0, -1]
    embedding: list[float] = torch.nn.functional.normalize(state, dim=0).tolist()
    return embedding


def test_inputs_have_the_model_s_embeddings_by_worker_and_router(workers, model, prompts):
    inputs = [prompts(5), prompts(40)]
    for worker in workers:
        reply = worker.client.http.post(PATH, json={"model": MODEL, "input": inputs})

        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == 45
        for given, made in zip(inputs, reply.json()["data"], strict=True):
            assert made["embedding"] == pytest.approx(expected(model, given), abs=1e-4)


def test_an_input_that_is_too_long_is_a_400_in_the_engine_s_words(workers, prompts):
    body = {"model": MODEL, "input": prompts(MAX_MODEL_LEN + 1)}
    for worker in workers:
        reply = worker.client.http.post(PATH, json=body)

        assert reply.status_code == 400, reply.text
        assert str(MAX_MODEL_LEN) in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "1 2 3"}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}),
    ],
)
def test_text_is_refused_with_the_way_out(workers, path, fields):
    for worker in workers:
        reply = worker.client.http.post(path, json={"model": MODEL, "max_tokens": 2, **fields})

        assert reply.status_code in (400, 404), reply.text
        assert "makes embeddings, and generates no text" in reply.json()["error"]["message"]


def test_they_count_where_they_are_asked_for_and_where_they_are_computed(workers, prompts):
    mixed, router = workers
    before = {worker: worker.metrics() for worker in workers}
    body = {"model": MODEL, "input": ["1 2 3", "4"]}
    reply = router.client.http.post(PATH, json=body)

    assert reply.status_code == 200, reply.text
    num_tokens = reply.json()["usage"]["prompt_tokens"]
    router.wait_growth(before[router], "request_success_total", 2, finish_reason="stop")
    mixed.wait_growth(before[mixed], "prompt_tokens_total", num_tokens)
    assert mixed.growth(before[mixed], "request_success_total", finish_reason="stop") == 0
