"""One PDCluster from apply to Ready on fakes: what each reconcile writes, and how many files of the
operator one enters.
"""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import pdcluster_operator
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_operator.controller import Controller, ControllerSettings
from pdcluster_operator.queue.runner import Done
from tests.operator import bodies
from tests.operator.pdcluster_operator.reconcile.api_fake import FakeApi
from tests.operator.pdcluster_operator.reconcile.sessions import KEY
from tests.schema.object_cases import minimal

SITE = RenderSettings("example/worker:1", "example/etcd:1", "default", "cluster.local")
PACKAGE = Path(pdcluster_operator.__file__).parent
MAX_FILES = 30


class Walk:
    """Reconciles one after the other, each with the answers of the API server in the cache."""

    def __init__(self) -> None:
        self.api, client = FakeApi(), Any
        client = self.api
        settings = ControllerSettings(SITE, "operator-0")
        self.controller = Controller(client, client, settings, CollectorRegistry())
        self.reconciler = self.controller._reconciler
        self._deliver()

    def put(self, kind: str, body: bodies.Body) -> None:
        self.controller.cache.put(kind, self.api.put(kind, body))

    def _deliver(self) -> None:
        spec = {**minimal()["spec"], "discovery": {"etcd": {"endpoints": ["127.0.0.1:1"]}}}
        self.put("PDCluster", bodies.cluster(spec=spec))

    async def one(self) -> tuple[Done, list[str]]:
        """One reconcile, with what it wrote."""
        self.api.writes.clear()
        done = await self.reconciler.reconcile(KEY)
        return done, [each for each in self.api.writes if " Event " not in each]

    @property
    def status(self) -> dict[str, Any]:
        return self.api.objects["PDCluster", bodies.NAME].get("status", {})


@pytest.fixture
async def walk() -> AsyncIterator[Walk]:
    found = Walk()
    yield found
    for session in found.controller._sessions:
        session.stop()


async def test_children_are_made_then_the_status_is_written_then_nothing(walk: Walk):
    done, writes = await walk.one()
    assert {each.split()[0] for each in writes} == {"apply", "create"}
    assert done.requeue_after_seconds == 0.0
    writes = (await walk.one())[1]
    assert "status PDCluster chat" in writes
    assert not [each for each in writes if each.startswith(("apply", "create", "delete"))]
    for _ in range(3):
        _, writes = await walk.one()
    assert writes == []
    (session,) = walk.controller._sessions
    assert {name.kind for name in session.settled} >= {"StatefulSet", "Service", "PDPoolScaler"}


async def test_a_reconcile_enters_few_files_of_the_operator(walk: Walk):
    entered = set[str]()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await walk.one()
        await walk.one()
    finally:
        sys.settrace(before)
    found = sorted(each for each in entered if each.startswith(str(PACKAGE)))
    assert 0 < len(found) <= MAX_FILES, found
