"""Workers of several pods under real controllers: made, restarted as a whole, scaled, and nothing
written at rest.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, ready
from tests.apiserver.operator_fixtures import operator_in
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

NAMESPACE = "operator-groups"
POOL = {"name": "wide", "replicas": 2, "podsPerReplica": 3}


def serving(pod: Body) -> dict[str, Any] | None:
    """As `ready`, with the times at which a kubelet says that it all began; not before the other
    pods are there, since a leader waits for them.
    """
    made, clock = pod["metadata"]["creationTimestamp"], datetime.now(UTC)
    is_new = clock - datetime.fromisoformat(made) < timedelta(seconds=3)
    if is_new or (pod.get("status") or {}).get("containerStatuses"):
        return None
    now, status = clock.strftime("%Y-%m-%dT%H:%M:%SZ"), ready(pod)
    containers = [
        {**each, "state": {"running": {"startedAt": made}}} for each in status["containerStatuses"]
    ]
    return {
        **status,
        "startTime": made,
        "conditions": [{**status["conditions"][0], "lastTransitionTime": now}],
        "containerStatuses": containers,
    }


@pytest.fixture(scope="module")
def scene(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A ready cluster of two workers of three pods."""
    folder: Path = tmp_path_factory.mktemp("groups")
    with operator_in(control_plane, folder, NAMESPACE):
        api = PlainApi(control_plane.kubeconfig)
        with Nodes(api, NAMESPACE, serving):
            found = Scene(api, NAMESPACE)
            found.create(
                engine={"dataParallelSize": 3},
                roles={"mixed": {"pools": [POOL]}},
                rollout={"drainTimeoutSeconds": 1},
            )
            found.await_condition("Ready", "True")
            yield found


def workers(scene: Scene) -> dict[str, set[str]]:
    """Uids of the pods of each worker, by its index."""
    name = scene.workload("mixed", "wide")
    found: dict[str, set[str]] = {}
    for pod, uid in scene.pods().items():
        if pod.startswith(name):
            found.setdefault(pod.removeprefix(f"{name}-").partition("-")[0], set()).add(uid)
    return found


def restarts(scene: Scene) -> str:
    """Notes of all events about restarts."""
    found = scene.api.items(f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events")
    return "\n".join(each["note"] for each in found if each["reason"] == "GroupRestarting")


def await_workers(scene: Scene, number: int) -> dict[str, set[str]]:
    def are_there() -> bool:
        return sorted(map(len, workers(scene).values())) == [3] * number

    wait_for(are_there, DEADLINE_SECONDS, lambda: f"{workers(scene)} {scene.status}")
    return workers(scene)


def test_each_worker_has_its_pods_and_nothing_is_written_at_rest(scene: Scene) -> None:
    found = await_workers(scene, 2)
    assert set(found) == {"0", "1"}
    assert scene.await_condition("Ready", "True")
    assert scene.status["decode"] == "2/2"
    before = scene.settled_versions()
    assert scene.settled_versions() == before


@pytest.mark.parametrize("which", ["1-0", "1-f-2"])
def test_a_pod_that_is_replaced_restarts_its_worker_and_no_other(scene: Scene, which: str) -> None:
    before = await_workers(scene, 2)
    scene.await_condition("Ready", "True")
    began = datetime.now(UTC)
    wait_for(lambda: (datetime.now(UTC) - began).seconds >= 7, 20, "what is later for sure")

    pod = f"{scene.workload('mixed', 'wide')}-{which}"
    scene.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")

    said = f"pod {pod}: "  # it was deleted, or another one took its place
    wait_for(lambda: said in restarts(scene), DEADLINE_SECONDS, lambda: str(restarts(scene)))
    wait_for(
        lambda: len(found := workers(scene).get("1", set())) == 3 and not found & before["1"],
        DEADLINE_SECONDS,
        lambda: f"{before} {workers(scene)} {scene.status}",
    )
    assert await_workers(scene, 2)["0"] == before["0"]
    scene.await_condition("Ready", "True")
    last = await_workers(scene, 2)
    assert scene.settled_versions()
    assert workers(scene) == last  # once


def test_the_worker_of_the_highest_index_goes_and_comes_again(scene: Scene) -> None:
    before, path = await_workers(scene, 2), scene.path("PDPoolScaler", f"{scene.name}-mixed-wide")
    said = restarts(scene)
    assert scene.api.merge(path, {"spec": {"replicas": 1}}) is not None
    assert await_workers(scene, 1) == {"0": before["0"]}
    name = scene.workload("mixed", "wide")
    assert set(scene.children("StatefulSet")) >= {f"{name}-0", f"{name}-0-f"}
    assert not {f"{name}-1", f"{name}-1-f"} & set(scene.children("StatefulSet"))

    for replicas in (0, 2):
        assert scene.api.merge(path, {"spec": {"replicas": replicas}}) is not None
        await_workers(scene, replicas)
    scene.await_condition("Ready", "True")
    assert restarts(scene) == said
