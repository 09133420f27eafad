"""Two workers of one machine lend each other their cores, and give the same tokens."""

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdcluster_worker.system.cpu_cores import SLOT, VARIABLE
from tests.system.cluster import NewCluster, Pair
from tests.system.prompts import Prompts
from tests.system.waiting import wait_for

SETTLE_SECONDS = 30.0
STREAMED = 1500
LENGTHS = (1, 17, 64, 100, 200, 300)


@pytest.fixture(scope="module")
def cores_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lent") / "cores"


@pytest.fixture(scope="module")
def lending(open_cluster: NewCluster, cores_file: Path) -> Iterator[Pair]:
    """A prefill and a decode worker of one thread each, on two cores as `pdctl` would say it."""
    with open_cluster("lending") as cluster:
        workers = [
            cluster.add_worker(role, f"lending-{role}-0", start=False)
            for role in ("prefill", "decode")
        ]
        for place, worker in enumerate(workers):
            said = {"path": str(cores_file), "place": place, "threads": [1, 1], "cores": 2}
            worker.environment = {VARIABLE: json.dumps(said)}
            worker.start()
        cluster.wait_ready()
        yield Pair(cluster, *workers)


def working(file: Path) -> dict[str, int]:
    content = file.read_bytes()
    lines = {
        role: struct.unpack_from("=ii", content, place * SLOT)
        for place, role in enumerate(("prefill", "decode"))
    }
    return {role: threads for role, (rests, threads) in lines.items() if not rests}


def wait_for_working(file: Path, **threads: int) -> None:
    wait_for(
        lambda: working(file) == threads, SETTLE_SECONDS, lambda: f"{working(file)} is {threads}"
    )


def test_a_decode_engine_computes_on_the_core_of_a_resting_prefill_engine(lending, cores_file):
    prompt = Prompts("lent to decode")(20)
    with lending.decode.client.stream(prompt, "local", max_tokens=STREAMED) as stream:
        stream.read_tokens(1)
        wait_for_working(cores_file, decode=2)
        stream.read_all()
    wait_for_working(cores_file)
    lending.cluster.wait_settled()


def test_a_prefill_engine_has_its_core_back_and_both_give_the_tokens_of_one(lending, reference):
    prompts = Prompts("lent and taken back")
    cases = [prompts(length) for length in LENGTHS * 3]
    ways = ["remote", "local", "auto"] * len(LENGTHS)
    with ThreadPoolExecutor(6) as pool:
        answers = pool.map(
            lambda case: lending.decode.client.complete(*case, max_tokens=24),
            zip(cases, ways, strict=True),
        )
        for prompt, answer in zip(cases, answers, strict=True):
            assert len(answer.tokens) == 24
            reference.check(prompt, answer.tokens)
    assert lending.prefill.metrics().value("prefill_tokens_total") > 0
    lending.cluster.wait_settled()


def test_a_worker_that_ends_leaves_its_core(lending, cores_file):
    lending.prefill.terminate()
    lending.prefill.wait_end()
    wait_for_working(cores_file)
    prompt = Prompts("alone")(20)
    with lending.decode.client.stream(prompt, "local", max_tokens=STREAMED) as stream:
        stream.read_tokens(1)
        wait_for_working(cores_file, decode=2)
    lending.prefill.restart()
    lending.cluster.wait_ready()
