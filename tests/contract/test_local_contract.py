"""Contract of pdctl and worker: the environment in which `pdctl up` starts an engine."""

from pathlib import Path

import pytest

from pdcluster_schema.load import parse
from pdcluster_worker.config.worker import load_worker_config
from pdcluster_worker.system.cpu_cores import SharedCores, core_share, own_cores, wait_environment
from pdctl.local.plan import plan_local
from pdctl.local.processes import Launch
from pdctl.local.run_directory import Certificates, RunDirectory, RunSettings, write_process
from tests.schema.object_cases import minimal

CORES = 5


@pytest.fixture
def launches(tmp_path: Path) -> list[Launch]:
    """A prefill and a decode worker that share a machine's cores, and let others in."""
    cluster = parse(minimal())
    site = RunSettings(
        run=RunDirectory.create(tmp_path, "chat"),
        model_path=tmp_path,
        etcd_endpoints=("127.0.0.1:1",),
        certificates=Certificates(*(tmp_path / name for name in ("ca", "certificate", "key"))),
        command=("worker",),
        host="192.0.2.1",
    )
    plan = plan_local(cluster, cores=CORES, port=8000)
    return [write_process(cluster, process, site) for process in plan.processes]


@pytest.fixture
def environments(launches: list[Launch]) -> list[dict[str, str]]:
    return [launch.environment for launch in launches]


def test_only_http_of_the_ingress_leaves_this_machine(launches: list[Launch]) -> None:
    listening = {
        launch.name: load_worker_config(Path(launch.command[2])).listen for launch in launches
    }
    assert {name: (each.host, each.http_host) for name, each in listening.items()} == {
        "chat-prefill-cpu-0": ("127.0.0.1", None),
        "chat-decode-cpu-0": ("127.0.0.1", "192.0.2.1"),
    }


def test_engines_of_one_run_share_its_cores_by_one_file(
    environments: list[dict[str, str]],
) -> None:
    places = [core_share(environment) for environment in environments]
    assert all(places)
    assert len({place.path for place in places if place}) == 1
    first, second = (SharedCores(place) for place in places if place)
    assert (first.most, second.most) == (CORES, CORES)

    assert first.take() + second.take() == CORES
    second.rest()
    assert first.take() == CORES


def test_threads_of_an_engine_own_their_cores_and_spin(
    environments: list[dict[str, str]],
) -> None:
    for environment in environments:
        assert own_cores(environment, [], 0.0) == CORES // len(environments)
        assert "GOMP_SPINCOUNT" in wait_environment(CORES // len(environments), environment)
