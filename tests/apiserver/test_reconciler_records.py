"""Records of workers that do not exist, on a real etcd and a real API server, pass by pass and by a
clock that a test sets.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdcluster_operator.reconcile.etcd_view import IDLE_POLL_SECONDS
from pdcluster_schema import etcd_keys
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.passes import Passes, passes_over
from tests.apiserver.plain_api import PlainApi
from tests.apiserver.registered import record_key, record_of
from tests.system.etcd_server import EtcdServer
from tests.system.waiting import wait_for


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.close()


class Recorded:
    """A cluster whose pods are ready and registered, and the passes over it."""

    def __init__(self, scene: Scene, etcd: EtcdServer, passes: Passes) -> None:
        self.scene, self.etcd, self.passes = scene, etcd, passes
        self._seconds = 0.0
        self.said: list[str] = []
        view = passes.session.etcd
        view.clock = lambda: time.monotonic() + self._seconds

    def put(self, pod: str) -> str:
        """Register a decode worker; returns its key."""
        prefix = etcd_keys.workers_prefix(
            self.scene.namespace, self.scene.name, self.scene.revision
        )
        key = etcd_keys.worker_key(prefix, "decode", "cpu", pod)
        self.etcd.put(key, record_of("ready"))
        return key

    def records(self) -> set[str]:
        return set(
            self.etcd.values(
                etcd_keys.workers_prefix(self.scene.namespace, self.scene.name, self.scene.revision)
            )
        )

    async def look(self) -> str:
        """Reconcile until the worker records are read and their state is reported; returns the
        message of the condition.

        What is odd may be mended, and read again, by then: `said` has every message.
        """
        for _ in ("etcd is asked", "what it says is odd", "and stays so"):
            self._seconds += IDLE_POLL_SECONDS
            await self.passes.loop.fill()
            await self._report()
            if (task := self.passes.session.etcd.reading) is not None:
                await task
        await self._report()
        return self.said[-1]

    async def _report(self) -> None:
        await self.passes.until_written()
        self.said.append(str(self.scene.condition("DiscoveryInSync").get("message")))


@asynccontextmanager
async def recorded(
    plane: ControlPlane, namespace: str, etcd: EtcdServer
) -> AsyncIterator[Recorded]:
    scene = Scene(PlainApi(plane.kubeconfig), namespace)
    scene.create(discovery={"etcd": {"endpoints": [etcd.endpoint]}})
    async with passes_over(plane.kubeconfig, namespace) as passes:
        await passes.until_written()
        scene.until(lambda: len(scene.pods()) == 3)
        for pod in scene.api.items(f"/api/v1/namespaces/{namespace}/pods"):
            etcd.put(record_key(namespace, pod["metadata"]), record_of("ready"))
        yield Recorded(scene, etcd, passes)


async def test_the_record_of_a_pod_that_does_not_exist_is_removed_and_those_of_pods_stay(
    control_plane: ControlPlane, namespace: str, etcd: EtcdServer
):
    with Nodes(PlainApi(control_plane.kubeconfig), namespace):
        async with recorded(control_plane, namespace, etcd) as there:
            assert await there.look() == "the records in etcd are those of the pods"
            kept, ghost = there.records(), there.put("ghost")
            await there.look()
            assert any("ghost" in each for each in there.said)
            wait_for(
                lambda: there.records() == kept, DEADLINE_SECONDS, lambda: f"{there.records()}"
            )
            assert ghost not in kept
            await there.look()
            assert await there.look() == "the records in etcd are those of the pods"
            assert not (await there.passes.one()).wrote


async def test_a_pod_that_only_the_api_server_knows_keeps_its_record(
    control_plane: ControlPlane, namespace: str, etcd: EtcdServer
):
    """The cache may be behind, and a pod may have lost the labels by which it is found."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger"},
        "spec": {"containers": [{"name": "worker", "image": "example/worker:1"}]},
    }
    async with recorded(control_plane, namespace, etcd) as there:
        there.scene.api.create(f"/api/v1/namespaces/{namespace}/pods", pod)
        key = there.put("stranger")
        assert "stranger" in await there.look()
        await there.look()
        assert key in there.records()


async def test_while_etcd_is_away_nothing_is_written_again(
    control_plane: ControlPlane, namespace: str, etcd: EtcdServer
):
    with Nodes(PlainApi(control_plane.kubeconfig), namespace):
        async with recorded(control_plane, namespace, etcd) as there:
            before = await there.look()
            etcd.kill()
            assert await there.look() == before
            assert there.scene.condition("DiscoveryInSync")["status"] == "True"
