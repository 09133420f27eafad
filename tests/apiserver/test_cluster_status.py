"""Status and events on the real API server."""

import json
from typing import Any

import pytest

from pdcluster_api.apiserver.kinds import EVENT, PDCLUSTER, POOL_SCALER
from pdcluster_api.plan.result import PlannedEvent
from pdcluster_operator.reconcile.statuses import (
    PERIOD_SECONDS,
    EventRecorder,
    write_status,
)
from tests.apiserver import cluster_objects as objects
from tests.apiserver.cluster_client import Connection, connected
from tests.apiserver.control_plane import ControlPlane

Body = dict[str, Any]


def condition(status: str, reason: str) -> Body:
    stamp = "2026-01-01T00:00:00Z"
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": "x",
        "lastTransitionTime": stamp,
        "observedGeneration": 1,
    }


async def test_status_is_written_as_a_whole(connection: Connection, owner: Body):
    first = {
        "observedGeneration": 1,
        "endpoint": "http://x/v1",
        "conditions": [condition("False", "Starting")],
    }
    written = await write_status(connection.client, PDCLUSTER, owner, first)
    assert written is not None
    assert written["status"] == first
    assert written["metadata"]["generation"] == owner["metadata"]["generation"]
    second = {"observedGeneration": 1, "conditions": [condition("True", "AsDeclared")]}
    written = await write_status(connection.client, PDCLUSTER, written, second)
    assert written is not None
    assert written["status"] == second


async def test_status_does_not_touch_what_the_spec_has_become(
    connection: Connection, owner: Body, control_plane: ControlPlane
):
    namespace = owner["metadata"]["namespace"]
    patch = {"spec": {"roles": {"decode": {"pools": [{"name": "cpu", "replicas": 3}]}}}}
    control_plane.kubectl(
        "-n", namespace, "patch", "pdcluster", "chat", "--type=merge", "-p", json.dumps(patch)
    )
    written = await write_status(connection.client, PDCLUSTER, owner, {"observedGeneration": 1})
    assert written is not None
    assert written["spec"]["roles"]["decode"]["pools"][0]["replicas"] == 3


async def test_status_of_an_object_that_is_gone_is_not_written(
    connection: Connection, owner: Body, control_plane: ControlPlane
):
    namespace = owner["metadata"]["namespace"]
    control_plane.kubectl("-n", namespace, "delete", "pdcluster", "chat")
    assert (
        await write_status(connection.client, PDCLUSTER, owner, {"observedGeneration": 1}) is None
    )
    other = await connection.owner(namespace)
    assert (
        await write_status(connection.client, PDCLUSTER, owner, {"observedGeneration": 9}) is None
    )
    stored = await connection.get(PDCLUSTER, namespace, other["metadata"]["name"])
    assert stored["status"] == {"observedGeneration": -1}


async def test_status_of_a_scaler_is_what_scale_shows(
    connection: Connection, owner: Body, control_plane: ControlPlane
):
    namespace = owner["metadata"]["namespace"]
    await connection.converge(owner, [objects.scaler(owner, replicas=2)])
    live = await connection.get(POOL_SCALER, namespace, "chat-decode-cpu")
    await write_status(
        connection.client, POOL_SCALER, live, {"replicas": 2, "selector": "pdcluster.io/pool=cpu"}
    )
    shown = json.loads(
        control_plane.kubectl(
            "-n", namespace, "get", "pdps", "chat-decode-cpu", "--subresource=scale", "-o", "json"
        )
    )
    assert shown["status"] == {"replicas": 2, "selector": "pdcluster.io/pool=cpu"}


async def test_an_event_shows_where_the_object_is_described(
    connection: Connection, owner: Body, control_plane: ControlPlane
):
    events = EventRecorder(connection.client, "operator-0")
    assert await events.post(owner, PlannedEvent("RolloutStarted", "to revision 0123abcd"))
    assert await events.post(owner, PlannedEvent("NameTaken", "Service chat exists", warning=True))
    described = control_plane.kubectl(
        "-n", owner["metadata"]["namespace"], "describe", "pdcluster", "chat"
    )
    [started] = [line for line in described.splitlines() if "RolloutStarted" in line]
    assert started.split()[0] == "Normal"
    assert started.endswith("to revision 0123abcd")
    [taken] = [line for line in described.splitlines() if "NameTaken" in line]
    assert taken.split()[0] == "Warning"


async def test_an_event_is_posted_once_in_its_period(connection: Connection, owner: Body):
    now = [0.0]
    events = EventRecorder(connection.client, "operator-0", clock=lambda: now[0])
    event = PlannedEvent("Scaled", "decode/cpu to 2")
    assert await events.post(owner, event)
    assert not await events.post(owner, event)
    assert await events.post(owner, PlannedEvent("Scaled", "decode/cpu to 3"))
    now[0] = PERIOD_SECONDS
    assert await events.post(owner, event)
    posted = [body async for body in connection.client.list(EVENT, owner["metadata"]["namespace"])]
    assert len(posted) == 3


async def test_a_refused_event_is_lost_and_posted_when_it_is_due_again(
    control_plane: ControlPlane, owner: Body, caplog: pytest.LogCaptureFixture
):
    async with connected(control_plane.kubeconfig_for("no-rights")) as limited:
        events = EventRecorder(limited.client, "operator-0")
        assert not await events.post(owner, PlannedEvent("Scaled", "x"))
        assert not await events.post(owner, PlannedEvent("Scaled", "x"))
        assert limited.calls("create") == 2
    assert "no event posted reason=Scaled object=chat" in caplog.text
