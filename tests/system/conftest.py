"""Real clusters for the system tests.

Nothing is mocked: etcd, gRPC over mutual TLS, the KV port, HTTP and the model
(a tiny random one, in float32) are the real things, in processes of their own.
Starting a worker costs seconds, so clusters that a test leaves as it found them
are shared: `pair` (one prefill, one decode worker), `slow` (the same with small
chunks and a slow transfer, so that a test can act in between) and `mixed`.  A
test that needs other workers starts a cluster of its own from `new_cluster`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.make_tiny_model import VOCAB_SIZE, make_tiny_model
from tests.reference import Reference
from tests.system import cluster as clusters
from tests.system.certificates import Certificates, make_certificates
from tests.system.client import Json
from tests.system.cluster import Cluster, NewCluster, Pair
from tests.system.etcd_server import EtcdServer
from tests.system.prompts import Prompts
from tests.system.tokens import write_tokenizer
from tests.system.worker_process import WorkerProcess

SLOW_BYTES_PER_SECOND = 128 << 10
"""Rate of the slow cluster's prefill worker: 16 blocks of the tiny model a second."""


SLOW: Json = {"maxBatchedTokens": 4, "maxSequences": 4, "verifyTransfers": True}
"""Budget of both its engines: hundreds of steps for a long prompt; checksums cost little at that
speed.
"""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of every worker's log with a failed test."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for cluster in clusters.OPEN:
            report.sections.extend(
                (f"log of {cluster.name}/{name}", tail) for name, tail in cluster.logs().items()
            )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


def make_model(folder: Path, seed: int) -> Path:
    make_tiny_model("llama-heavy", folder, seed)
    write_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "cluster")


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all clusters; a test that kills it brings it back."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def open_cluster(
    tmp_path_factory: pytest.TempPathFactory,
    etcd: EtcdServer,
    certificates: Certificates,
    tiny_model: Path,
) -> NewCluster:
    folder = tmp_path_factory.mktemp("clusters")
    return lambda name: Cluster(name, folder, etcd, certificates, tiny_model)


@pytest.fixture
def new_cluster(open_cluster: NewCluster) -> Iterator[NewCluster]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(open_cluster(name))


@pytest.fixture(scope="session")
def pair_cluster(open_cluster: NewCluster) -> Iterator[Pair]:
    with open_cluster("pair") as cluster:
        yield Pair(
            cluster,
            cluster.add_worker("prefill", "pair-prefill-0"),
            cluster.add_worker("decode", "pair-decode-0"),
        )


@pytest.fixture
def pair(pair_cluster: Pair) -> Iterator[Pair]:
    """One prefill and one decode worker, both ready; a test may kill them."""
    pair_cluster.cluster.heal()
    yield pair_cluster
    pair_cluster.cluster.wait_settled()


@pytest.fixture(scope="session")
def slow_cluster(open_cluster: NewCluster) -> Iterator[Pair]:
    with open_cluster("slow") as cluster:
        prefill = cluster.add_worker(
            "prefill", "slow-prefill-0", transferBandwidth=SLOW_BYTES_PER_SECOND, **SLOW
        )
        yield Pair(cluster, prefill, cluster.add_worker("decode", "slow-decode-0", **SLOW))


@pytest.fixture
def slow(slow_cluster: Pair) -> Iterator[Pair]:
    """A pair whose prefills and transfers take so long that a test can act in between."""
    slow_cluster.cluster.heal()
    # not the prefill engine: a transfer that waits for its prefill is no slow one
    slow_cluster.decode.let_engines_yield()
    yield slow_cluster
    slow_cluster.cluster.wait_settled()


@pytest.fixture(scope="session")
def mixed_cluster(open_cluster: NewCluster) -> Iterator[Cluster]:
    with open_cluster("mixed") as cluster:
        cluster.add_worker("mixed", "mixed-0").wait_ready()
        yield cluster


@pytest.fixture
def mixed(mixed_cluster: Cluster) -> Iterator[WorkerProcess]:
    yield mixed_cluster.workers["mixed-0"]
    mixed_cluster.wait_settled()


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """Prompts that no other test uses, so that no prefix cache knows them; the same
    in every run.
    """
    return Prompts(request.node.nodeid)
