"""A roll out that stalls, on the real API server with its disruption controller, by a set clock."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pdcluster_schema.labels import REVISION
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, ready, waiting
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.passes import passes_over
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OTHER_ENGINE = {"maxBatchedTokens": 512}


def crashes(pod: Body) -> Body:
    """The status of a pod whose worker ends again and again."""
    status = waiting("CrashLoopBackOff", "back-off 5m0s restarting failed container")(pod)
    assert status is not None
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "it crashes"}}
    containers = [
        {**each, "restartCount": 3, "lastState": ended} for each in status["containerStatuses"]
    ]
    return {**status, "containerStatuses": containers}


class RollOut:
    """Passes over one PDCluster, each of an operator that has just started."""

    def __init__(self, plane: ControlPlane, scene: Scene, nodes: Nodes) -> None:
        self.plane, self.scene, self.nodes = plane, scene, nodes

    async def look(self, seconds: float = 0.0) -> None:
        """seconds: since the roll out began"""
        async with passes_over(self.plane.kubeconfig, self.scene.namespace) as passes:
            passes.loop._reconciler.applier.now = lambda: BEGIN + timedelta(seconds=seconds)
            await passes.until_written()

    def await_pods(self, *states: str) -> None:
        """So many are there, in these states: ready or not."""
        path = f"/api/v1/namespaces/{self.scene.namespace}/pods"

        def found() -> list[str]:
            return sorted(
                str(_is_ready(pod))
                for pod in self.scene.api.items(path)
                if pod["metadata"].get("labels", {}).get(REVISION)
            )

        wait_for(lambda: found() == sorted(states), DEADLINE_SECONDS, lambda: f"{found()}")

    def sizes(self, revision: str) -> list[int]:
        sets = self.scene.children("StatefulSet")
        return [
            sets[self.scene.workload(role, revision=revision)]["spec"]["replicas"]
            for role in ("prefill", "decode")
        ]

    def await_allowed(self, revision: str) -> Body:
        """The budget of the decode workers of a revision, once it lets one go."""
        path = self.scene.path(
            "PodDisruptionBudget", self.scene.workload("decode", revision=revision)
        )

        def found() -> Body | None:
            budget = self.scene.api.get(path)
            status = {} if budget is None else budget.get("status", {})
            is_seen = (
                budget is not None
                and status.get("observedGeneration") == budget["metadata"]["generation"]
            )
            return budget if is_seen and status.get("disruptionsAllowed") == 1 else None

        return self.scene.until(found)

    def evict(self, pod: str) -> None:
        """As `kubectl drain` does it.  Raises when a budget refuses."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        self.scene.api.create(
            f"/api/v1/namespaces/{self.scene.namespace}/pods/{pod}/eviction", body
        )


def _is_ready(pod: Body) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True"
        for each in pod["status"].get("conditions", ())
    )


@pytest.fixture
def rolling(control_plane: ControlPlane, namespace: str) -> Iterator[RollOut]:
    api = PlainApi(control_plane.kubeconfig)
    with Nodes(api, namespace) as nodes:
        yield RollOut(control_plane, Scene(api, namespace), nodes)


async def test_what_serves_can_be_evicted_and_a_revision_that_only_crashes_is_given_up(
    rolling: RollOut,
):
    scene = rolling.scene
    scene.create()
    await rolling.look()
    rolling.await_pods("True", "True", "True")
    await rolling.look()
    assert scene.condition("Ready")["status"] == "True"
    old, decode = scene.revision, scene.workload("decode")

    rolling.nodes.rule = lambda pod: (
        ready if pod["metadata"]["labels"].get(REVISION) in (None, old) else crashes
    )(pod)
    scene.change(engine=OTHER_ENGINE, rollout={"progressDeadlineSeconds": 600})
    await rolling.look()
    new = scene.revision
    rolling.await_pods("True", "True", "True", "False", "False", "False")
    await rolling.look(1)
    assert set(scene.children("PodDisruptionBudget")) == {
        scene.workload(role, revision=old) for role in ("prefill", "decode")
    }
    assert rolling.await_allowed(old)["spec"]["minAvailable"] == 1
    evicted = scene.pods()[f"{decode}-0"]
    rolling.evict(f"{decode}-0")
    scene.until(lambda: scene.pods().get(f"{decode}-0") not in (None, evicted))
    rolling.await_pods("True", "True", "True", "False", "False", "False")

    await rolling.look(599)
    assert (scene.condition("Ready")["reason"], rolling.sizes(new)) == ("CrashLooping", [1, 2])
    await rolling.look(600)
    assert (rolling.sizes(new), rolling.sizes(old)) == ([0, 0], [1, 2])
    stalled = scene.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ProgressDeadlineExceeded")
    assert "it crashes" in stalled["message"]
    assert scene.condition("Serving")["status"] == "True"
    rolling.await_pods("True", "True", "True")
    await rolling.look(6000)
    message = stalled["message"].replace("is being scaled to 0", "is scaled to 0")
    assert (rolling.sizes(new), scene.condition("Stalled")["message"]) == ([0, 0], message)

    scene.change(rollout={"progressDeadlineSeconds": 601})
    await rolling.look(6001)
    assert (rolling.sizes(new), scene.condition("Stalled")) == ([1, 2], {})
    scene.change(engine=None)
    await rolling.look(6002)
    assert scene.condition("Ready")["status"] == "True"
    assert not any(new in name for name in scene.children("StatefulSet"))


async def test_a_budget_of_an_older_operator_goes_as_the_new_ones_come(rolling: RollOut):
    """A pod under two budgets is never evicted."""
    scene = rolling.scene
    body = scene.create()
    owner = {
        "apiVersion": body["apiVersion"],
        "kind": "PDCluster",
        "name": scene.name,
        "uid": body["metadata"]["uid"],
        "controller": True,
    }
    labels = {
        "pdcluster.io/cluster": scene.name,
        "app.kubernetes.io/managed-by": "pdcluster-operator",
    }
    of_before = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "chat-decode-cpu", "labels": labels, "ownerReferences": [owner]},
        "spec": {
            "maxUnavailable": 1,
            "selector": {
                "matchLabels": {"pdcluster.io/cluster": scene.name, "pdcluster.io/role": "decode"}
            },
        },
    }
    scene.api.create(scene.path("PodDisruptionBudget"), of_before)
    await rolling.look()
    assert set(scene.children("PodDisruptionBudget")) == {
        scene.workload("prefill"),
        scene.workload("decode"),
    }
