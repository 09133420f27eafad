"""A cluster that is scaled by metrics, with workers that serve some, pass by pass."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pdcluster_schema.pdcluster import PDCluster
from tests.apiserver.fake_workers import FakeWorkers
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.passes import Passes


def scrape_each_second(passes: Passes) -> None:
    """Rounds come quicker than an object may ask for, so that a test need not wait."""
    autoscaling = passes.session.autoscaling
    follow = autoscaling.follow
    autoscaling.follow = lambda cluster, observed: follow(quickened(cluster), observed)


def quickened(cluster: PDCluster) -> PDCluster:
    autoscale = cluster.spec.autoscale.model_copy(update={"interval_seconds": 1})
    return cluster.model_copy(
        update={"spec": cluster.spec.model_copy(update={"autoscale": autoscale})}
    )


class Work:
    """A cluster with workers, and the operator's passes over it."""

    def __init__(self, scene: Scene, passes: Passes, workers: FakeWorkers, nodes: Nodes) -> None:
        self.scene, self.passes, self.workers, self.nodes = scene, passes, workers, nodes

    async def look(self) -> None:
        """Deliver the events of watches, and run the reconciles that follow."""
        for role in self.workers.num:
            found = self.scene.api.get(self.scene.path("StatefulSet", self.scene.workload(role)))
            self.workers.num[role] = 0 if found is None else found["status"].get("readyReplicas", 0)
        await self.passes.loop.fill()
        await self.passes.until_written()

    async def until(self, holds: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> None:
        """Look until it holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.scene.status
            await self.look()
            await asyncio.sleep(0.1)

    async def rounds(self, number: int) -> int:
        """So many rounds of scrapes, with passes in between; returns how many passes wrote
        something.
        """
        wrote, seen = 0, set[float]()
        while len(seen) <= number:
            await self.passes.loop.fill()
            windows = self.passes.session.autoscaling.windows
            assert windows is not None
            seen.update(sample.at for sample in windows.pools().get(("decode", "cpu"), ())[-1:])
            wrote += sum(done.wrote for done in await self.passes.until_written())
            await asyncio.sleep(0.1)
        return wrote

    def decided(self, role: str) -> int | None:
        """Workers by the record."""
        found = self.scene.status.get("autoscaling", {}).get("replicas", [])
        return next((each["replicas"] for each in found if each["role"] == role), None)

    def scaled(self, role: str) -> int:
        """Replicas that the pool's scaler asks for."""
        found = self.scene.api.get(self.scene.path("PDPoolScaler", f"chat-{role}-cpu"))
        assert found is not None
        replicas: int = found["spec"]["replicas"]
        return replicas

    def events(self, reason: str) -> list[str]:
        """Messages of the events with a reason."""
        items = self.scene.api.items(f"/api/v1/namespaces/{self.scene.namespace}/events")
        return [event["message"] for event in items if event["reason"] == reason]

    @property
    def decisions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.scene.status.get("autoscaling", {}).get(
            "lastDecisions", []
        )
        return found
