"""Failures of networks and busy API servers, from which a running operator recovers by itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdcluster_operator.queue.resync import MAX_MISSES
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.interruptions import Interruptions
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import PlainApi
from tests.system.waiting import wait_for

SILENCE_SECONDS = "5"  # after which the operator opens a watch again
STEPS_SECONDS = 60.0
LOOK_SECONDS = 0.5  # between two looks at what takes seconds


@pytest.fixture
def proxy(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Interruptions]:
    with Interruptions(control_plane, tmp_path) as found:
        yield found


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Iterator[Scene]:
    api = PlainApi(control_plane.kubeconfig)
    with Nodes(api, namespace):
        yield Scene(api, namespace)


def operator_through(
    proxy: Interruptions, folder: Path, scene: Scene, **settings: str
) -> OperatorProcess:
    return OperatorProcess(
        folder, proxy.kubeconfig, PDCLUSTER_WATCH_NAMESPACES=scene.namespace, **settings
    )


def test_a_watch_that_goes_silent_is_made_up_for_reported_and_begun_again(
    proxy: Interruptions, tmp_path: Path, scene: Scene
):
    silence = {"PDCLUSTER_WATCH_SILENCE_SECONDS": SILENCE_SECONDS}
    with operator_through(proxy, tmp_path, scene, **silence) as operator:
        scene.create()
        scene.await_condition("Ready", "True")
        path, edits = scene.path("ConfigMap", "chat-policy"), 0
        before = scene.api.get(path)
        assert before is not None
        proxy.silence("configmaps")

        def is_told() -> bool:
            nonlocal edits
            data = (scene.api.get(path) or before)["data"]  # conditions stand in it too
            if data["policy.yaml"] == before["data"]["policy.yaml"]:
                edits += 1
                scene.api.merge(path, {"data": {"policy.yaml": f"edited {edits}"}})
            return operator.get("/healthz") == (503, "the watch of ConfigMap is silent\n")

        wait_for(
            is_told,
            STEPS_SECONDS,
            lambda: f"{operator.get('/healthz')} after {edits} edits; log:\n{operator.log_end}",
            poll_seconds=LOOK_SECONDS,
        )
        assert edits >= MAX_MISSES  # each was reverted by the resync
        num_watches = proxy.num_watches["configmaps"]
        proxy.let_speak("configmaps")
        wait_for(
            lambda: proxy.num_watches["configmaps"] > num_watches,
            STEPS_SECONDS,
            "no new watch",
            poll_seconds=LOOK_SECONDS,
        )
        wait_for(
            lambda: operator.get("/healthz") == (200, "ok\n"),
            STEPS_SECONDS,
            lambda: f"{operator.get('/healthz')}",
        )
        assert scene.api.get(path) is not None
        scene.await_condition("Ready", "True")


def test_a_deletion_that_fell_into_the_gap_of_an_expired_watch_is_seen(
    proxy: Interruptions, tmp_path: Path, scene: Scene
):
    with operator_through(proxy, tmp_path, scene, PDCLUSTER_RESYNC_SECONDS=SELDOM) as operator:
        scene.create()
        scene.await_condition("Ready", "True")
        path, num_watches = scene.path("ConfigMap", "chat-policy"), proxy.num_watches["configmaps"]
        proxy.silence("configmaps")
        scene.api.delete(path)
        proxy.expire("configmaps")
        wait_for(
            lambda: scene.api.get(path),
            DEADLINE_SECONDS,
            lambda: f"not created again; log:\n{operator.log_end}",
        )
        assert proxy.num_watches["configmaps"] > num_watches
        scene.api.delete(path)  # the new watch reports it
        wait_for(
            lambda: scene.api.get(path),
            DEADLINE_SECONDS,
            lambda: f"not created again; log:\n{operator.log_end}",
        )
        assert operator.get("/healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    ("code", "reason"), [(429, "TooManyRequests"), (409, "Conflict"), (503, "ServiceUnavailable")]
)
def test_a_burst_of_refusals_passes(
    proxy: Interruptions, tmp_path: Path, scene: Scene, code: int, reason: str
):
    with operator_through(proxy, tmp_path, scene, PDCLUSTER_RESYNC_SECONDS=SELDOM) as operator:
        proxy.refuse_writes(code, reason, times=30)
        scene.create()
        scene.await_condition("Ready", "True")
        assert proxy.num_refusals == 0
        proxy.refuse_writes(code, reason, times=10)
        scene.change(routing={"offload": {"prefillQueueMax": 17}})
        scene.await_condition("Ready", "True")
        assert proxy.num_refusals == 0
        policy = scene.api.get(scene.path("ConfigMap", "chat-policy"))
        assert policy is not None
        assert "17" in policy["data"]["policy.yaml"]
        assert operator.get("/healthz") == (200, "ok\n")
