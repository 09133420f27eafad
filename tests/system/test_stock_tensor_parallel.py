"""Tensor-parallel ranks of a real vLLM: KV between unequally many by NIXL on this CPU, and two in
a pod each, as the operator renders them.  As tests/system/test_stock_vllm.py, where
PDCLUSTER_TEST_VLLM is set.
"""

from pathlib import Path

import pytest

from tests.reference import Reference
from tests.system.cluster import Cluster, Pair
from tests.system.prompts import Prompts
from tests.system.stock_pods import FOLLOWER, StockPods, add_worker
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
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


def of_one_pod(cluster: Cluster, model: Path, role: str, size: int) -> WorkerProcess:
    worker = cluster.add_worker(role, f"{cluster.name}-{role}-0", model=model, start=False)
    worker.settings["engine"] = stock_engine(model, role, tensorParallelSize=size)
    worker.start()
    return worker


def check_paths(pair: Pair, model: Path, prompts: Prompts, lengths: tuple[int, ...]) -> None:
    """A remote prefill gives the tokens of a local one, which are the model's."""
    before, reference = pair.decode.metrics(), Reference(model)
    for length in lengths:
        prompt = prompts(length)
        remote = pair.decode.client.complete(prompt, "remote")
        local = pair.decode.client.complete(prompt, "local")

        assert (remote.prefill, local.prefill) == ("remote", "local")
        assert remote.tokens == local.tokens
        reference.check(prompt, remote.tokens)
    pair.decode.wait_growth(before, "remote_prefill_total", len(lengths), outcome="ok")


def test_two_prefill_ranks_fill_the_blocks_of_one_decode_rank(open_cluster, model, prompts):
    with open_cluster("unequal") as cluster:
        cluster.lease_seconds = LEASE_SECONDS
        prefill = of_one_pod(cluster, model, "prefill", 2)
        pair = Pair(cluster, prefill, of_one_pod(cluster, model, "decode", 1))
        wait_ready(pair)

        check_paths(pair, model, prompts, (1, 31, 32, 33, 100, 300))

        assert prefill.record["device"]["tensor_parallel_size"] == 2


def test_ranks_of_two_pods_serve_end_and_start_again_together(
    open_cluster, model, prompts, tmp_path
):
    """Two decode ranks, which read KV of one prefill rank."""
    with (
        open_cluster("tensor") as cluster,
        StockPods(model, tmp_path, "decode", tensorParallelSize=2) as pods,
    ):
        cluster.lease_seconds = LEASE_SECONDS
        pair = Pair(cluster, of_one_pod(cluster, model, "prefill", 1), add_worker(cluster, pods))
        wait_ready(pair)
        check_paths(pair, model, prompts, (1, 32, 33, 300))

        logged = len(pair.decode.log.read_text())
        with pair.decode.client.stream(prompts(64), "remote", max_tokens=900) as stream:
            stream.read_tokens(3)
            pods.kill(FOLLOWER)
            stream.read_all()

        assert stream.error is not None
        assert not stream.done
        pods.end()  # as the operator has it
        assert pair.decode.wait_end() == 1
        assert "makes progress again" not in pair.decode.log.read_text()[logged:]

        pods.start()
        pair.decode.restart(wait=False)
        wait_ready(pair)
        check_paths(pair, model, prompts, (100,))
