"""A reconcile takes the answers to its own writes, which no event reports again."""

from typing import Any

import pytest

from pdcluster_api.apiserver.errors import UnsettledError
from pdcluster_api.apiserver.kinds import Key
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_operator.informer.cache import name_of
from pdcluster_operator.reconcile import apply_plan
from pdcluster_operator.reconcile.write_conflicts import MAX_WRITES
from pdcluster_schema.labels import MANAGED_BY
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.operator_stage import Scene
from tests.apiserver.passes import Passes, passes_over
from tests.apiserver.plain_api import PlainApi


@pytest.fixture
def scene(control_plane: ControlPlane, namespace: str) -> Scene:
    found = Scene(PlainApi(control_plane.kubeconfig), namespace)
    found.create()
    return found


def status_of_scaler(scene: Scene) -> dict[str, object]:
    found = scene.api.get(scene.path("PDPoolScaler", "chat-decode-cpu"))
    return {} if found is None else found.get("status", {})


async def test_what_was_written_is_looked_at_again_at_once_and_then_nothing_is_written(
    control_plane: ControlPlane, scene: Scene
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        first, *_, last = await passes.until_written()
        assert (first.wrote, first.requeue_after_seconds) == (True, 0.0)
        assert status_of_scaler(scene)  # of what the first pass made
        assert not (await passes.one()).wrote
        assert last.requeue_after_seconds is None or last.requeue_after_seconds > 0.0


async def test_a_spec_that_changes_while_its_status_is_written_is_due_at_once(
    control_plane: ControlPlane, scene: Scene
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        await passes.until_written()
        scene.change(
            roles={"decode": {"pools": [{"name": "cpu", "replicas": 3, "maxReplicas": 5}]}}
        )
        cached = passes.loop.cache.get("PDCluster", *passes.key)
        assert cached is not None
        passes.loop.cache.forget(name_of("PDCluster", cached))
        # As if there were something to report.
        assert (
            passes.loop.cache.put(
                "PDCluster",
                {**cached, "status": {**cached["status"], "endpoint": "http://another"}},
            )
            == passes.key
        )
        done = await passes.one()
        assert done.requeue_after_seconds == 0.0
        await passes.until_written()
        assert scene.replicas("decode") == 3


async def test_a_cluster_that_was_replaced_unseen_is_found_and_served(
    control_plane: ControlPlane, scene: Scene
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        before = passes.uid
        scene.delete()
        after = scene.create()["metadata"]["uid"]
        await passes.one()  # which takes it for the one before
        done = await passes.one()  # which has a status for it
        assert (done.try_again, passes.uid) == (True, after)
        assert before != after
        # collected with their owner
        scene.until(lambda: not scene.everything())


async def test_a_cluster_that_was_deleted_unseen_is_forgotten(
    control_plane: ControlPlane, scene: Scene
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        scene.delete()
        await passes.one()
        done = await passes.one()
        assert (done.requeue_after_seconds, passes.uid) == (0.0, None)
        assert (await passes.one()).requeue_after_seconds is None
        assert passes.loop.metrics.pdclusters.labels("False")._value.get() == 0


@pytest.mark.parametrize("is_refused", [True, False], ids=["something-refused", "nothing-refused"])
async def test_a_pass_with_an_object_that_would_not_hold_still_tells_the_rest_and_counts(
    control_plane: ControlPlane, scene: Scene, monkeypatch: pytest.MonkeyPatch, is_refused: bool
):
    refused = [WriteFailure("Service chat", "NameTaken", "exists")] if is_refused else []

    async def unsettled(*_: Any) -> list[WriteFailure]:
        raise UnsettledError("ConfigMap chat-policy was changed by others again and again", refused)

    monkeypatch.setattr(apply_plan, "apply", unsettled)  # no real server is so fast and so regular
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        done = await passes.one()
        assert (done.try_again, done.wrote, done.requeue_after_seconds) == (True, True, None)
        assert scene.condition("Ready")["reason"] == ("NameTaken" if is_refused else "Starting")
        for _ in range(MAX_WRITES):
            await passes.one()
        assert scene.condition("Ready")["reason"] == ("NameTaken" if is_refused else "ApplyFailed")
        assert (
            is_refused
            or "deletes what the operator has to revert (10 times"
            in scene.condition("Ready")["message"]
        )


async def test_a_certificate_secret_that_was_made_immutable_is_reported_with_what_to_do(
    control_plane: ControlPlane, scene: Scene
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        await passes.until_written()
        path = scene.path("Secret", "chat-pdc-tls")
        before = scene.api.merge(path, {"immutable": True})
        assert before is not None
        control_plane.kubectl(
            "annotate", "--namespace", scene.namespace, "pdc/chat", "pdcluster.io/rotate-ca=now"
        )
        await passes.loop.fill()
        for _ in range(3):
            done = await passes.one()
        assert done.try_again
        after = scene.api.get(path)
        assert after is not None
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        message = scene.condition("Ready")["message"]
        assert "Secret chat-pdc-tls" in message
        assert "delete the object, and the operator creates it again without" in message
        assert "ServiceAccount (the chart" not in message


async def test_a_pdcluster_at_rest_is_not_looked_at_until_something_changed(
    control_plane: ControlPlane, scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        while any(done.wrote for done in await passes.until_written()):
            pass
        looked, children = list[Key](), passes.loop.cache.children
        monkeypatch.setattr(
            passes.loop.cache, "children", lambda key: looked.append(key) or children(key)
        )
        await passes.one()
        assert looked == []
        path = scene.path("Service", "chat")
        scene.api.merge(path, {"spec": {"selector": {"app": "mine"}}})
        await passes.loop.fill()
        await passes.until_written()
        assert looked != []
        service = scene.api.get(path)
        assert service is not None
        assert "app" not in service["spec"]["selector"]


async def without_pods(passes: Passes) -> None:
    """Reconcile with all objects but the pods, of which no watch has reported any."""
    cache = passes.loop.cache
    for stateful_set in cache.versions("StatefulSet"):
        cache.forget(stateful_set)
    await passes.loop.fill()
    for pod in cache.versions("Pod"):
        cache.forget(pod)
    await passes.until_written()


def num_pods(scene: Scene) -> dict[str, int]:
    """Pods of each StatefulSet of workers, as these count them."""
    sets = scene.children("StatefulSet")
    return {
        name: body["status"].get("replicas", 0)
        for name, body in sets.items()
        if not name.endswith("-etcd")
    }


async def test_recreate_waits_for_pods_that_no_watch_has_reported(
    control_plane: ControlPlane, scene: Scene
):
    scene.change(rollout={"strategy": "Recreate"})
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        await passes.until_written()
        old, held = (
            scene.workload("decode"),
            f"/api/v1/namespaces/{scene.namespace}/pods/{scene.workload('decode')}-1",
        )
        # etcd's among them
        scene.until(lambda: len(scene.pods()) == 4)
        scene.api.merge(held, {"metadata": {"finalizers": ["example.com/hold"]}})
        scene.change(engine={"maxBatchedTokens": 512})
        await without_pods(passes)
        scene.until(lambda: num_pods(scene) == {old: 1})
        await without_pods(passes)
        assert num_pods(scene) == {old: 1}
        assert (
            "the old revision has to end first; 1 of its pods are left"
            in scene.condition("Ready")["message"]
        )
        scene.api.merge(held, {"metadata": {"finalizers": []}})
        scene.until(lambda: old not in scene.children("StatefulSet"))
        await without_pods(passes)
        assert scene.replicas("decode") == 2


@pytest.mark.parametrize("is_edited", [False, True], ids=["left alone", "edited meanwhile"])
async def test_children_are_not_compared_again_after_the_statuses_of_their_scalers(
    control_plane: ControlPlane, scene: Scene, *, is_edited: bool
):
    async with passes_over(control_plane.kubeconfig, scene.namespace) as passes:
        await passes.one()
        if is_edited:
            scene.api.merge(
                scene.path("PDPoolScaler", "chat-decode-cpu"),
                {"metadata": {"labels": {MANAGED_BY: "me"}}},
            )
        assert (await passes.one()).wrote
        fingerprint = passes.session.fingerprint
        assert (fingerprint is None) == is_edited
        assert (await passes.one()).wrote == is_edited
        after = passes.session.fingerprint
        assert (after and after.until) == (fingerprint and fingerprint.until)
