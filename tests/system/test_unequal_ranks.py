"""Workers whose engines have several rank processes: KV moves between unequal ones [N6], and one
that loses a rank ends.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.ports import free_ports
from tests.system.cluster import Cluster, NewCluster
from tests.system.worker_process import WorkerProcess
from tests.transports import need_transport

LENGTHS = (16, 17, 100, 300)


@pytest.fixture(scope="module")
def ranks_cluster(open_cluster: NewCluster) -> Iterator[Cluster]:
    with open_cluster("ranks") as cluster:
        for role in ("prefill", "decode"):
            cluster.add_worker(role, f"{role}-1", verifyTransfers=True)
            worker = cluster.add_worker(
                role, f"{role}-2", start=False, verifyTransfers=True, tensorParallelSize=2
            )
            worker.settings["listen"]["kv"] = free_ports(2)  # each rank has one
            worker.start()
        yield cluster


@pytest.fixture
def ranks(ranks_cluster: Cluster) -> Iterator[Cluster]:
    """All ready; a test may kill them."""
    ranks_cluster.heal()
    yield ranks_cluster
    ranks_cluster.wait_settled()


def rank_of(worker: WorkerProcess) -> psutil.Process:
    """Its rank 1, a child of its engine process."""
    (rank,) = psutil.Process(worker.engine_pid).children()
    return rank


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_remote_prefill_between_unequal_ranks_gives_the_same_tokens(
    ranks, prompts, reference, prefill, decode
):
    source, target = ranks.workers[f"prefill-{prefill}"], ranks.workers[f"decode-{decode}"]
    with ranks.drained_by_command(f"prefill-{3 - prefill}", f"decode-{3 - decode}"):
        for other in (f"prefill-{3 - prefill}", f"decode-{3 - decode}"):
            ranks.wait_state(other, "drained")
        before, sent = target.metrics(), source.metrics()
        for length in LENGTHS:
            prompt = prompts(length)
            answer = target.client.complete(prompt, "remote")
            assert answer.prefill == "remote"
            reference.check(prompt, answer.tokens)
        num_blocks = sum(-(-length // 16) for length in LENGTHS)
        target.wait_growth(
            before, "kv_transfer_bytes_total", num_blocks * target.block_bytes, direction="received"
        )
        source.wait_growth(
            sent, "kv_transfer_bytes_total", num_blocks * target.block_bytes, direction="sent"
        )
        target.wait_growth(before, "remote_prefill_total", len(LENGTHS), outcome="ok")
    ranks.wait_state(f"prefill-{3 - prefill}", "ready")
    ranks.wait_state(f"decode-{3 - decode}", "ready")


@pytest.fixture(params=["nixl", "ucx"])
def transport(request: pytest.FixtureRequest) -> str:
    return need_transport(request.param)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_every_rank_of_unequal_workers_writes_by_the_transport_of_the_pair(
    new_cluster, transport, prompts, reference, prefill, decode
):
    cluster = new_cluster(f"ranks-{transport}-{prefill}")
    for role, size in (("prefill", prefill), ("decode", decode)):
        worker = cluster.add_worker(
            role,
            f"{role}-{size}",
            start=False,
            verifyTransfers=True,
            tensorParallelSize=size,
            transport=transport,
        )
        worker.settings["listen"]["kv"] = free_ports(size)
        worker.start()
    cluster.wait_ready()
    source, target = cluster.workers.values()
    before, prompt = target.metrics(), prompts(100)

    answer = target.client.complete(prompt, "remote")

    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)
    target.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    for worker in (source, target):
        assert worker.metrics().by_label("kv_transport_info", "transport") == {transport: 1}
    assert source.metrics().value("kv_transport_fallbacks_total") == 0
    cluster.wait_settled()


def test_version_and_record_say_the_ranks(ranks):
    for size in (1, 2):
        worker = ranks.workers[f"decode-{size}"]
        assert worker.client.http.get("/version").json()["device"]["tensor_parallel_size"] == size
        assert worker.record["device"].get("tensor_parallel_size", 1) == size


def test_a_dead_rank_ends_its_worker_and_costs_others_nothing(ranks, prompts, reference):
    """Kill a rank of a prefill worker first, then of a decode worker in the middle of a stream."""
    prefill, decode = ranks.workers["prefill-2"], ranks.workers["decode-2"]
    os.kill(rank_of(prefill).pid, signal.SIGKILL)
    assert prefill.wait_end() == 1
    assert "rank 1 of this engine" in prefill.log_tail()
    assert ranks.record("prefill-2") is None

    prompt = prompts(300)
    with decode.client.stream(prompt, "auto", max_tokens=1500) as stream:
        stream.read_tokens(2)
        os.kill(rank_of(decode).pid, signal.SIGKILL)
        with contextlib.suppress(httpx.RemoteProtocolError):
            stream.read_all()
    assert not stream.done
    assert decode.wait_end() == 1
    assert ranks.record("decode-2") is None

    prompt = prompts(300)
    reference.check(prompt, ranks.workers["decode-1"].client.complete(prompt, "auto").tokens)
