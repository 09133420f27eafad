"""A flip from real HTTP scrapes to a command in a real etcd, and back: a worker of the flexible
prefill pool decodes while decode is short of one and the budget has no room.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.apiserver.autoscaled_work import Work, scrape_each_second
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.fake_workers import FakeWorkers
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import PlainApi
from tests.apiserver.registered import Registered
from tests.system.etcd_server import EtcdServer

POOL = {"name": "cpu", "flexible": True, "maxReplicas": 4}
ROLES = {
    "prefill": {"pools": [{**POOL, "replicas": 3, "minReplicas": 2}]},
    "decode": {"pools": [{**POOL, "replicas": 1, "minReplicas": 1}]},
}
AUTOSCALE = {
    "mode": "On",
    "budget": {"total": 4},
    "scaleDown": {"windowSeconds": 2, "maxStep": 1},
}


class Flips:
    def __init__(self, work: Work, registered: Registered, etcd: EtcdServer) -> None:
        self.work, self.registered, self.etcd = work, registered, etcd

    @property
    def roles(self) -> dict[str, str]:
        return self.registered.roles(self.work.scene.name)

    @property
    def columns(self) -> tuple[str, str]:
        status = self.work.scene.status
        return status["prefill"], status["decode"]


@pytest.fixture
async def flips(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> AsyncIterator[Flips]:
    """A cluster at rest, whose budget has no room."""
    etcd = EtcdServer(tmp_path)
    etcd.start()
    scene = Scene(PlainApi(control_plane.kubeconfig), namespace)
    scene.create(
        roles=ROLES,
        autoscale=AUTOSCALE,
        discovery={"etcd": {"endpoints": [etcd.endpoint]}},
    )
    async with FakeWorkers() as workers:
        workers.load |= {"prefill": 1.8, "decode": 0.6}
        with (
            Registered(scene.api, namespace, etcd) as registered,
            Nodes(scene.api, namespace, workers.rule) as nodes,
        ):
            async with passes_over(
                control_plane.kubeconfig, namespace, worker_port=workers.port
            ) as passes:
                scrape_each_second(passes)
                work = Work(scene, passes, workers, nodes)
                await work.until(lambda: scene.condition("Ready").get("status") == "True")
                yield Flips(work, registered, etcd)
    etcd.close()


async def test_budget_without_room_gives_decode_a_prefill_worker_until_it_needs_it_no_more(
    flips: Flips,
) -> None:
    work, scene = flips.work, flips.work.scene
    first = f"{scene.workload('prefill')}-0"
    assert flips.columns == ("3/3", "1/1")

    work.workers.load |= {"prefill": 0.3, "decode": 1.4}
    await work.until(lambda: flips.roles == {first: "decode"})
    await work.until(lambda: flips.columns == ("2/2", "2/2"))
    (entry,) = scene.status["autoscaling"]["flipped"]
    assert (entry["role"], entry["workers"]) == ("prefill", 1)
    assert entry["statefulSet"] == scene.workload("prefill")
    assert (scene.replicas("prefill"), scene.replicas("decode")) == (3, 1)
    assert any("a worker changes its role" in each for each in work.events("Autoscaled"))
    windows = work.passes.session.autoscaling.windows
    assert windows is not None
    await work.rounds(2)
    sample = windows.pools()[("decode", "cpu")][-1]
    assert {worker.pod for worker in sample.workers} == {first, f"{scene.workload('decode')}-0"}

    flips.etcd.delete(f"/pdcluster/{scene.namespace}/{scene.name}/commands/{first}/role")
    await work.until(lambda: flips.roles == {first: "decode"}, seconds=90)

    work.workers.load["decode"] = 0.1
    await work.until(lambda: not flips.roles)
    await work.until(lambda: flips.columns[1] == "1/1")
    assert "flipped" not in scene.status["autoscaling"]
    assert any("takes its own role again" in each for each in work.events("Autoscaled"))
