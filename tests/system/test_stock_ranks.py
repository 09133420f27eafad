"""Two data-parallel ranks of one real vLLM behind each worker, KV between them by NIXL on this CPU.

As tests/system/test_stock_vllm.py, where PDCLUSTER_TEST_VLLM is set.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference import Reference
from tests.system.cluster import NewCluster, Pair
from tests.system.stock_vllm import FOLDER, SWITCH, make_wide_model, stock_engine
from tests.system.worker_process import WorkerProcess

START_SECONDS = 900.0

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get(SWITCH) or not (FOLDER / ".ready").is_file(),
        reason=f"set {SWITCH}=1, after bench/peers/install_vllm.sh {FOLDER}",
    ),
    pytest.mark.timeout(2 * START_SECONDS),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def pair(open_cluster: NewCluster, model: Path) -> Iterator[Pair]:
    """Two ranks on both sides."""
    with open_cluster("ranks") as cluster:
        cluster.lease_seconds = 60
        workers = []
        for role in ("prefill", "decode"):
            worker = cluster.add_worker(role, f"ranks-{role}-0", model=model, start=False)
            worker.settings["engine"] = stock_engine(model, role, size=2)
            worker.start()
            workers.append(worker)
        for worker in workers:
            worker.wait_ready(START_SECONDS)
        cluster.wait_connected()
        yield Pair(cluster, *workers)


def by_rank(worker: WorkerProcess) -> dict[str, float]:
    """Requests that each rank was given."""
    return worker.metrics().by_label("engine_requests_total", "engine")


def test_both_ranks_on_both_sides_answer_and_give_the_model_s_tokens(pair, model, prompts):
    before = [by_rank(worker) for worker in (pair.prefill, pair.decode)]
    reference = Reference(model)
    for number in range(6):
        prompt = prompts(64 + number)
        remote = pair.decode.client.complete(prompt, "remote")
        local = pair.decode.client.complete(prompt, "local")

        assert (remote.prefill, local.prefill) == ("remote", "local")
        assert remote.tokens == local.tokens
        reference.check(prompt, remote.tokens)

    after = [by_rank(worker) for worker in (pair.prefill, pair.decode)]
    for old, new in zip(before, after, strict=True):
        assert all(new[rank] > old.get(rank, 0.0) for rank in ("0", "1")), (old, new)


def test_a_prefix_is_reused_at_the_rank_that_has_it(pair, prompts):
    for number in range(4):
        prompt = prompts(256 + number)
        first = pair.decode.client.complete(prompt, "local")
        before = by_rank(pair.decode)

        again = pair.decode.client.complete([*prompt, *first.tokens, 7], "local")

        assert again.cached_tokens >= 256, number
        grown = {rank for rank, count in by_rank(pair.decode).items() if count > before[rank]}
        assert len(grown) == 1


def test_each_rank_has_an_engine_id_and_a_port_in_the_record(pair):
    for worker in (pair.prefill, pair.decode):
        engines = worker.record["engines"]
        first = worker.settings["engine"]["vllm"]["sideChannelPort"]

        assert [engine["state"] for engine in engines] == ["ready", "ready"]
        assert len({engine["engine_id"] for engine in engines}) == 2
        ports = [int(engine["kv_address"].rpartition(":")[2]) for engine in engines]
        assert ports == [first, first + 1]
