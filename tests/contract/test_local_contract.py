"""Contract of pdctl and worker: the environment in which `pdctl up` starts an engine."""

from pathlib import Path

import pytest

from pdcluster_schema.load import parse
from pdcluster_worker.system.cpu_cores import SharedCores, core_share, own_cores, wait_environment
from pdctl.local.plan import plan_local
from pdctl.local.run_directory import Certificates, RunDirectory, RunSettings, write_process
from tests.schema.object_cases import minimal

CORES = 5


@pytest.fixture
def environments(tmp_path: Path) -> list[dict[str, str]]:
    """Environments of a prefill and a decode worker that share a machine's cores."""
    cluster = parse(minimal())
    site = RunSettings(
        run=RunDirectory.create(tmp_path, "chat"),
        model_path=tmp_path,
        etcd_endpoints=("127.0.0.1:1",),
        certificates=Certificates(*(tmp_path / name for name in ("ca", "certificate", "key"))),
        command=("worker",),
    )
    plan = plan_local(cluster, cores=CORES, port=0)
    return [write_process(cluster, process, site).environment for process in plan.processes]


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
