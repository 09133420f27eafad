"""A real vLLM over two pods, one of which is lost; where PDCLUSTER_TEST_VLLM is set."""

import pytest

from tests.reference import Reference
from tests.system.stock_pods import FOLLOWER, StockPods, add_worker
from tests.system.stock_vllm import (
    LEASE_SECONDS,
    NOT_ASKED,
    START_SECONDS,
    installed,
    make_wide_model,
)

pytestmark = [
    pytest.mark.skipif(not installed(), reason=NOT_ASKED),
    pytest.mark.timeout(1200),
]


def test_requests_of_a_lost_pod_go_on_at_the_other_and_none_hangs(open_cluster, tmp_path, prompts):
    model = make_wide_model(tmp_path)
    reference = Reference(model)
    with (
        open_cluster("pods") as cluster,
        StockPods(model, tmp_path, "mixed", dataParallelSize=2) as pods,
    ):
        cluster.lease_seconds = LEASE_SECONDS
        worker = add_worker(cluster, pods)
        worker.wait_ready(START_SECONDS)
        for number in range(4):
            prompt = prompts(64 + number)
            reference.check(prompt, worker.client.complete(prompt).tokens)
        counts = worker.metrics().by_label("engine_requests_total", "engine")
        assert set(counts) == {"0", "1"}

        worker.take_policy({"stallSeconds": 3})
        pods.kill(FOLLOWER)

        for number in range(4):
            prompt = prompts(64 + number)
            reference.check(prompt, worker.client.complete(prompt).tokens)
        assert "engine stalled" in worker.log.read_text()
