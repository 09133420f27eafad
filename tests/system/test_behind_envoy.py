"""An endpoint picker behind a real Envoy, which moves the bytes between clients and real workers.

Runs where bench/peers/install_envoy.sh has put Envoy.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.system.client import Client, body
from tests.system.cluster import Cluster, NewCluster
from tests.system.envoy import FOLDER, envoy_before
from tests.system.worker_process import WorkerProcess

POLICY = {
    "relaying": {"policy": "textPrefix", "prefixBytes": 64},
    # a picker takes a request for open for a time after its choice: fast ones in a row would spread
    "decodeScore": {"hotspotPrevention": False},
}
AT_ONCE_SECONDS = 5.0
"""Far less than a client waits, and what a busy machine may take."""

pytestmark = pytest.mark.skipif(
    not (FOLDER / ".ready").is_file(), reason=f"run bench/peers/install_envoy.sh {FOLDER}"
)


@pytest.fixture(scope="module")
def cluster(open_cluster: NewCluster) -> Iterator[Cluster]:
    with open_cluster("picked") as cluster:
        for role, number in (("prefill", 0), ("decode", 0), ("decode", 1), ("picker", 0)):
            worker = cluster.add_worker(role, f"picked-{role}-{number}", start=False)
            worker.settings["listen"]["picker"] = free_port()
            worker.write_policy(POLICY)
            worker.start()
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def picker(cluster: Cluster) -> WorkerProcess:
    picker = cluster.workers["picked-picker-0"]
    if not picker.is_alive:
        picker.start()
    cluster.heal()
    picker.wait_for(lambda: num_endpoints(picker) == 2, "the picker knows the decode workers")
    return picker


@pytest.fixture(scope="module")
def envoy(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    port = cluster.workers["picked-picker-0"].settings["listen"]["picker"]
    with envoy_before(port, tmp_path_factory.mktemp("envoy")) as client:
        yield client


def num_endpoints(picker: WorkerProcess) -> float:
    return picker.metrics().value("picker_endpoints")


def num_taken(cluster: Cluster) -> dict[str, float]:
    """Requests of clients that each decode worker has answered."""
    name = "time_to_first_token_seconds_count"
    pods = ("picked-decode-0", "picked-decode-1")
    return {pod: cluster.workers[pod].metrics().value(name) for pod in pods}


def takers(cluster: Cluster, before: dict[str, float]) -> dict[str, float]:
    now = num_taken(cluster)
    return {pod: now[pod] - before[pod] for pod in now if now[pod] != before[pod]}


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_answers_through_envoy_are_those_of_the_workers(
    cluster, picker, envoy, prompts, reference, mode
):
    prompt, before = prompts(70), num_taken(cluster)

    answer = envoy.complete(prompt, mode, max_tokens=8)

    reference.check(prompt, answer.tokens)
    assert (len(answer.tokens), answer.prefill) == (8, mode)
    with envoy.stream(prompt, mode, max_tokens=8) as stream:
        assert stream.read_all() == answer.tokens
    assert list(takers(cluster, before).values()) == [2]  # the same prompt, so the same worker


@pytest.mark.parametrize("body_mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_prompts_that_begin_alike_go_to_one_worker(
    cluster, picker, prompts, tmp_path: Path, body_mode
):
    port = picker.settings["listen"]["picker"]
    trailers = "SEND" if body_mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    found = set()
    with envoy_before(
        port, tmp_path, request_body_mode=body_mode, request_trailer_mode=trailers
    ) as client:
        for _ in range(8):
            prompt, before = prompts(30), num_taken(cluster)
            for _ in range(3):
                client.complete(prompt, max_tokens=2)
            ((pod, number),) = takers(cluster, before).items()
            assert number == 3
            found.add(pod)
    assert len(found) == 2  # and others elsewhere: 1 in 128 that not


def test_a_large_prompt_passes_whole(picker, envoy, prompts):
    request = body(prompts(20), max_tokens=2, user="x" * 300_000)
    assert envoy.post(request).status_code == 200


def test_a_worker_that_drains_gets_no_new_requests(cluster, picker, envoy, prompts):
    with envoy.stream(prompts(8), max_tokens=64) as stream:
        stream.read_tokens(1)
        with cluster.drained_by_command("picked-decode-0"):
            picker.wait_for(lambda: num_endpoints(picker) == 1, "the picker sees the drain")
            before = num_taken(cluster)
            for _ in range(6):
                envoy.complete(prompts(8), max_tokens=2)
            assert takers(cluster, before) == {"picked-decode-1": 6}
            assert len(stream.read_all()) == 64


def test_without_a_worker_envoy_answers_503_at_once(cluster, picker, envoy, prompts):
    with cluster.drained_by_command("picked-decode-0", "picked-decode-1"):
        picker.wait_for(lambda: num_endpoints(picker) == 0, "the picker sees that both drain")
        start = time.monotonic()
        response = envoy.post(body(prompts(8)))
        assert time.monotonic() - start < AT_ONCE_SECONDS
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["code"] == "no_decode_worker"


def test_answers_outlive_their_picker_and_new_requests_fail_at_once(
    cluster, picker, envoy, prompts
):
    with envoy.stream(prompts(8), max_tokens=64) as stream:
        stream.read_tokens(1)
        picker.terminate()
        assert picker.wait_end() == 0
        assert len(stream.read_all()) == 64
    start = time.monotonic()
    assert envoy.post(body(prompts(8))).status_code == 500
    assert time.monotonic() - start < AT_ONCE_SECONDS
    picker.start()
    picker.wait_for(
        lambda: envoy.post(body(prompts(8))).status_code == 200, "Envoy has found it again"
    )


def test_a_picker_serves_no_clients(picker, prompts):
    response = picker.client.post(body(prompts(8)))
    assert response.status_code == 404
    assert "a picker worker, which serves no clients" in response.json()["error"]["message"]
