"""One PDCluster from apply to Ready on fakes: what each reconcile writes, and how many files of the
operator one enters.
"""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import pdcluster_operator
from pdcluster_api.apiserver.errors import ClusterError, ForbiddenError, NotFoundError
from pdcluster_api.manifests.render import RenderSettings
from pdcluster_operator.controller import Controller, ControllerSettings
from pdcluster_operator.queue.work_queue import Done
from pdcluster_schema.conditions import CONDITIONS_FILE
from tests.operator import bodies
from tests.operator.pdcluster_operator.reconcile.api_fake import FakeApi
from tests.operator.pdcluster_operator.reconcile.sessions import KEY
from tests.operator.pods import pod_body
from tests.schema.object_cases import minimal

SITE = RenderSettings("example/worker:1", "example/etcd:1", "default", "cluster.local")
PACKAGE = Path(pdcluster_operator.__file__).parent
MAX_FILES = 30


class Walk:
    """Reconciles one after the other, each with the answers of the API server in the cache."""

    def __init__(self, **sections: Any) -> None:
        self.api, client = FakeApi(), Any
        client = self.api
        settings = ControllerSettings(SITE, "operator-0")
        self.controller = Controller(client, client, settings, CollectorRegistry())
        self.reconciler = self.controller._reconciler
        self._deliver(**sections)

    def put(self, kind: str, body: bodies.Body) -> None:
        self.controller.cache.put(kind, self.api.put(kind, body))

    def _deliver(self, **sections: Any) -> None:
        etcd = {"etcd": {"endpoints": ["127.0.0.1:1"]}}
        spec = {**minimal()["spec"], "discovery": etcd, **sections}
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


def copied(walk: Walk) -> list[tuple[str, str, str]]:
    """Conditions beside the policy file."""
    file = json.loads(walk.api.objects["ConfigMap", "chat-policy"]["data"][CONDITIONS_FILE])
    return [(each["type"], each["status"], each["message"]) for each in file["items"]]


def written(walk: Walk) -> list[tuple[str, str, str]]:
    """Conditions of the status."""
    found = walk.status["conditions"]
    return [(each["type"], each["status"], each["message"]) for each in found]


async def test_conditions_are_in_the_policy_config_map_and_an_edit_of_them_is_reverted(
    walk: Walk,
):
    await walk.one()
    writes = (await walk.one())[1]
    policy = walk.api.objects["ConfigMap", "chat-policy"]
    assert writes.count("patch ConfigMap chat-policy") == 1
    assert copied(walk) == written(walk) != []
    assert "offload" in policy["data"]["policy.yaml"]

    for broken in ("", "[]", '{"written": "", "items": []}'):
        walk.put("ConfigMap", {**policy, "data": {**policy["data"], CONDITIONS_FILE: broken}})
        writes = (await walk.one())[1]
        assert writes == ["patch ConfigMap chat-policy"]
        assert copied(walk) == written(walk)
    assert (await walk.one())[1] == []


async def test_conditions_of_an_object_that_became_invalid_reach_workers(walk: Walk):
    for _ in range(3):
        await walk.one()
    body = walk.api.objects["PDCluster", bodies.NAME]
    spec = {**body["spec"], "model": {"name": ""}}
    walk.put("PDCluster", {**body, "spec": spec, "metadata": {**body["metadata"], "generation": 2}})
    writes = (await walk.one())[1]
    assert writes == ["patch ConfigMap chat-policy", "status PDCluster chat"]
    assert copied(walk) == written(walk)
    assert "spec.model.name" in next(text for kind, _, text in copied(walk) if kind == "Ready")
    assert (await walk.one())[1] == []


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (ForbiddenError("may not patch"), "conditions not copied key=default/chat error=may not"),
        (NotFoundError("it is gone"), ""),
    ],
)
async def test_a_copy_that_cannot_be_written_stops_nothing(
    walk: Walk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: ClusterError,
    logged: str,
):
    async def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(walk.api, "merge_patch", refuse)
    await walk.one()
    await walk.one()
    assert walk.status["conditions"]
    assert logged in caplog.text
    assert bool(logged) == bool(caplog.text)


def group_pod(stateful_set: bodies.Body, ordinal: int, **metadata: Any) -> bodies.Body:
    """A pod of a worker of several pods that has no node yet."""
    name, template = stateful_set["metadata"]["name"], stateful_set["spec"]["template"]["metadata"]
    marks = {"labels": template["labels"], "annotations": template["annotations"]}
    return pod_body(f"{name}-{ordinal}", owner=name, metadata={**marks, **metadata})


@pytest.mark.parametrize(("replicas", "events"), [(2, 1), (1, 0)])
async def test_a_worker_that_is_scaled_away_as_its_pods_end_gives_no_event_of_a_restart(
    replicas: int, events: int
):
    pool = {"name": "wide", "replicas": 2, "podsPerReplica": 2}
    walk = Walk(engine={"dataParallelSize": 2}, roles={"mixed": {"pools": [pool]}})
    for _ in range(3):
        await walk.one()
    (leader,) = (
        each
        for (kind, name), each in walk.api.objects.items()
        if kind == "StatefulSet" and name.endswith("-1")
    )
    followers = walk.api.objects["StatefulSet", f"{leader['metadata']['name']}-f"]
    walk.put("Pod", group_pod(leader, 0))
    walk.put("Pod", group_pod(followers, 1, deletionTimestamp="2026-01-02T03:04:05Z"))
    scaler = walk.api.objects["PDPoolScaler", "chat-mixed-wide"]
    walk.put("PDPoolScaler", {**scaler, "spec": {**scaler["spec"], "replicas": replicas}})
    await walk.one()
    found = [body for (kind, _), body in walk.api.objects.items() if kind == "Event"]
    assert [each["reason"] for each in found].count("GroupRestarting") == events
    assert ("GroupRestarting" in str(walk.status)) == bool(events)
    assert (("StatefulSet", leader["metadata"]["name"]) in walk.api.objects) == (replicas == 2)
    for session in walk.controller._sessions:
        session.stop()
