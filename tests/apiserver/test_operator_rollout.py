"""A new revision replaces the old one, by either strategy, and the pods that serve are never
touched before.
"""

import itertools
from collections.abc import Iterator

import pytest

from pdcluster_schema.labels import RETIRED, REVISION, TEMPLATE
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, ready, waiting
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_stage import Scene
from tests.apiserver.plain_api import Body, PlainApi

_numbers = itertools.count(1)
NAMESPACE = "operator-rollout"
SETTINGS = {"PDCLUSTER_RESYNC_SECONDS": SELDOM}
OTHER_ENGINE = {"maxBatchedTokens": 512}


@pytest.fixture
def scene(control_plane: ControlPlane, nodes: Nodes) -> Iterator[Scene]:
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE, f"chat-{next(_numbers)}")
    yield found
    found.delete()


def of_revision(scene: Scene, revision: str) -> list[str]:
    """Names of a revision's objects, without snapshots that are kept to go back to."""
    return [
        name
        for (_, name), body in scene.everything().items()
        if revision in name and body["metadata"].get("labels", {}).get(RETIRED) != "true"
    ]


def served(scene: Scene) -> str:
    """The revision that the Service selects."""
    service = scene.api.get(scene.path("Service", scene.name))
    return "" if service is None else service["spec"]["selector"][REVISION]


def test_blue_green_makes_the_new_next_to_the_old_then_switches_then_removes_the_old(
    scene: Scene, nodes: Nodes
):
    scene.create()
    scene.await_condition("Ready", "True")
    old, pods = scene.revision, scene.pods()
    nodes.rule = lambda pod: (
        ready(pod) if pod["metadata"]["labels"].get(REVISION) in (None, old) else None
    )
    scene.change(engine=OTHER_ENGINE)
    scene.until(lambda: len(scene.children("StatefulSet")) == 4)
    scene.await_condition("Ready", "False", "RollingOut")
    assert scene.condition("Serving")["status"] == "True"
    assert served(scene) == old
    assert scene.pods().items() > pods.items()
    nodes.rule = ready
    scene.await_condition("Ready", "True")
    new = scene.revision
    assert served(scene) == new != old
    scene.until(lambda: not any(old in name for name in scene.pods()))
    scene.until(lambda: not of_revision(scene, old))


def test_a_new_revision_that_fails_says_why_and_the_old_one_goes_on(scene: Scene, nodes: Nodes):
    scene.create()
    scene.await_condition("Ready", "True")
    old, pods = scene.revision, scene.pods()
    nodes.rule = lambda pod: (
        ready
        if pod["metadata"]["labels"].get(REVISION) in (None, old)
        else waiting("ImagePullBackOff", "no such image")
    )(pod)
    scene.change(image={"name": "example/none:1"})
    found = scene.await_condition("Ready", "False", "ImageNotPulled")
    assert "no such image" in found["message"]
    assert scene.condition("Serving")["status"] == scene.condition("Stalled")["status"] == "True"
    assert scene.pods().items() > pods.items()
    scene.change(image=None)  # back to what serves: the failed revision goes
    scene.await_condition("Ready", "True")
    scene.until(lambda: scene.pods() == pods)
    assert (scene.revision, served(scene)) == (old, old)


def test_recreate_removes_the_old_before_it_makes_the_new(scene: Scene, nodes: Nodes):
    scene.create(rollout={"strategy": "Recreate"})
    scene.await_condition("Ready", "True")
    old = scene.revision
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision
    seen: set[frozenset[str]] = set()

    def is_done() -> bool:
        seen.add(
            frozenset(
                revision for revision in (old, new) for name in scene.pods() if revision in name
            )
        )
        return scene.condition("Ready").get("status") == "True" and served(scene) == new

    scene.until(is_done)
    assert frozenset({old, new}) not in seen
    assert not any(old in name for name in scene.children("StatefulSet"))
    scene.until(lambda: not of_revision(scene, old))


def of_role(role: str, pods: dict[str, str]) -> dict[str, str]:
    return {name: uid for name, uid in pods.items() if f"-{role}-" in name}


def test_a_flag_of_decode_replaces_decode_alone_and_back_again(scene: Scene, nodes: Nodes):
    scene.create(rollout={"drainTimeoutSeconds": 1})  # no worker says that it has drained
    scene.await_condition("Ready", "True")
    revision, pods = scene.revision, scene.pods()
    nodes.rule = lambda pod: ready(pod) if TEMPLATE not in pod["metadata"]["labels"] else None
    scene.change(roles={"decode": {"engine": {"maxSequences": 32}}})
    found = scene.await_condition("Ready", "False", "RollingOut")
    assert found["message"].startswith(f"roll out to decode of revision {revision}: ")
    scene.until(lambda: len(of_role("decode", scene.pods())) == 4)
    assert scene.pods().items() > pods.items()
    assert scene.condition("Serving")["status"] == "True"

    nodes.rule = ready
    scene.await_condition("Ready", "True")
    scene.until(lambda: not of_role("decode", pods).keys() & scene.pods().keys())
    changed = scene.pods()
    assert (len(of_role("decode", changed)), served(scene)) == (2, revision)
    assert scene.status["revision"] == revision

    scene.change(roles={"decode": {"engine": None}})
    scene.until(lambda: not of_role("decode", changed).keys() & scene.pods().keys())
    scene.await_condition("Ready", "True")
    assert of_role("prefill", scene.pods()) == of_role("prefill", pods)
    assert (len(of_role("decode", scene.pods())), served(scene)) == (2, revision)


def test_another_spelling_replaces_nothing_and_an_edit_of_routers_routers_alone(
    scene: Scene, nodes: Nodes
):
    def limited(cpu: object) -> Body:
        return {"decode": {"resources": {"limits": {"cpu": cpu}}}}

    router: Body = {"pools": [{"name": "cpu", "replicas": 1}]}
    scene.create()
    scene.change(roles={**limited(1), "router": router})
    scene.await_condition("Ready", "True")
    pods = scene.pods()
    scene.change(roles=limited("1"))
    scene.await_condition("Ready", "True")
    scene.settled_versions()
    assert scene.pods() == pods

    scene.change(roles={"router": {"podTemplate": {"metadata": {"annotations": {"team": "a"}}}}})
    scene.until(lambda: not of_role("router", pods).items() & scene.pods().items())
    scene.await_condition("Ready", "True")
    for role in ("prefill", "decode"):
        assert of_role(role, scene.pods()) == of_role(role, pods)


def test_rolling_replaces_one_worker_after_the_other_while_both_revisions_serve(
    scene: Scene, nodes: Nodes
):
    # no worker here says that it has drained
    scene.create(rollout={"strategy": "Rolling", "drainTimeoutSeconds": 1})
    scene.await_condition("Ready", "True")
    old = scene.revision
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision
    seen: set[tuple[int, int]] = set()
    selectors: set[str | None] = set()

    def is_done() -> bool:
        decode = of_role("decode", scene.pods())
        seen.add((sum(old in name for name in decode), sum(new in name for name in decode)))
        service = scene.api.get(scene.path("Service", scene.name))
        selectors.add(service["spec"]["selector"].get(REVISION) if service else None)
        return scene.condition("Ready").get("status") == "True" and not of_revision(scene, old)

    scene.until(is_done)
    assert old != new
    assert all(2 <= sum(pods) <= 3 for pods in seen), seen
    assert selectors == {old, None, new}
