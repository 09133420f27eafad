"""Two data-parallel ranks of one real vLLM behind each worker, KV between them by NIXL on this CPU:
those of the prefill worker in a pod each, as the operator renders them, those of the decode worker
in one.  As tests/system/test_stock_vllm.py, where PDCLUSTER_TEST_VLLM is set.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference import Reference
from tests.system.cluster import NewCluster, Pair
from tests.system.stock_pods import StockPods, add_worker
from tests.system.stock_vllm import (
    LEASE_SECONDS,
    NOT_ASKED,
    installed,
    make_wide_model,
    stock_engine,
    wait_ready,
)
from tests.system.worker_process import WorkerProcess

pytestmark = [
    pytest.mark.skipif(not installed(), reason=NOT_ASKED),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def pair(
    open_cluster: NewCluster, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Two ranks on both sides."""
    with (
        open_cluster("ranks") as cluster,
        StockPods(model, tmp_path_factory.mktemp("pods"), "prefill", dataParallelSize=2) as pods,
    ):
        cluster.lease_seconds = LEASE_SECONDS
        prefill = add_worker(cluster, pods)
        decode = cluster.add_worker("decode", "ranks-decode-0", model=model, start=False)
        decode.settings["engine"] = stock_engine(model, "decode", size=2)
        decode.start()
        pair = Pair(cluster, prefill, decode)
        wait_ready(pair)
        yield pair


def by_rank(worker: WorkerProcess) -> dict[str, float]:
    """Requests that each rank was given."""
    return worker.metrics().by_label("engine_requests_total", "engine")


def grown(before: dict[str, float], after: dict[str, float]) -> set[str]:
    """Ranks that were given a request between the two."""
    return {rank for rank, count in after.items() if count > before.get(rank, 0.0)}


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
        assert grown(old, new) == {"0", "1"}


@pytest.mark.parametrize(("side", "leg"), [("prefill", "remote"), ("decode", "local")])
def test_a_prefix_is_reused_at_the_rank_that_has_it(pair, prompts, side, leg):
    worker = getattr(pair, side)
    used = set()
    for number in range(4):
        prompt = prompts(256 + number)
        before = by_rank(worker)
        first = pair.decode.client.complete(prompt, leg)
        between = by_rank(worker)
        again = pair.decode.client.complete([*prompt, *first.tokens, 7], leg)

        assert again.cached_tokens >= 256 or leg == "remote", number
        assert grown(before, between) == grown(between, by_rank(worker))
        used |= grown(before, between)
    assert used == {"0", "1"}


def test_each_rank_has_an_engine_id_and_a_port_in_the_record(pair):
    for worker in (pair.prefill, pair.decode):
        engines = worker.record["engines"]
        first = worker.settings["engine"]["vllm"]["sideChannelPort"]

        assert [engine["state"] for engine in engines] == ["ready", "ready"]
        assert len({engine["engine_id"] for engine in engines}) == 2
        ports = [int(engine["kv_address"].rpartition(":")[2]) for engine in engines]
        assert ports == [first, first + 1]
