"""A new revision replaces the old one, by either strategy, and the pods that serve are never
touched before.
"""

import itertools
from collections.abc import Iterator

import pytest

from pdcluster_schema.labels import REVISION
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes, Rule, ready, waiting
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_stage import DEADLINE_SECONDS, Scene
from tests.apiserver.plain_api import PlainApi
from tests.system.waiting import wait_for

_numbers = itertools.count(1)
NAMESPACE = "operator-rollout"
SETTINGS = {"PDCLUSTER_RESYNC_SECONDS": SELDOM}
OTHER_ENGINE = {"maxBatchedTokens": 512}


@pytest.fixture
def scene(control_plane: ControlPlane, nodes: Nodes) -> Iterator[Scene]:
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE, f"chat-{next(_numbers)}")
    yield found
    found.delete()


def only(revision: str, rule: Rule, others: Rule = ready) -> Rule:
    """One rule for the pods of a revision, another for the rest."""
    return lambda pod: (rule if pod["metadata"]["labels"].get(REVISION) == revision else others)(
        pod
    )


def of_revision(scene: Scene, revision: str) -> list[str]:
    """Names of a revision's objects."""
    return [name for _, name in scene.everything() if revision in name]


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
    wait_for(
        lambda: len(scene.children("StatefulSet")) == 4,
        DEADLINE_SECONDS,
        lambda: f"{[*scene.children('StatefulSet')]}",
    )
    scene.await_condition("Ready", "False", "RollingOut")
    assert scene.condition("Serving")["status"] == "True"
    assert served(scene) == old
    assert scene.pods().items() > pods.items()
    nodes.rule = ready
    scene.await_condition("Ready", "True")
    new = scene.revision
    assert served(scene) == new != old
    wait_for(
        lambda: not any(old in name for name in scene.pods()),
        DEADLINE_SECONDS,
        lambda: f"{scene.pods()}",
    )
    wait_for(
        lambda: not of_revision(scene, old), DEADLINE_SECONDS, lambda: f"{of_revision(scene, old)}"
    )


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
    wait_for(lambda: scene.pods() == pods, DEADLINE_SECONDS, lambda: f"{scene.pods()}")
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

    wait_for(is_done, DEADLINE_SECONDS, lambda: f"{scene.status}")
    assert frozenset({old, new}) not in seen
    assert not any(old in name for name in scene.children("StatefulSet"))
    wait_for(
        lambda: not of_revision(scene, old), DEADLINE_SECONDS, lambda: f"{of_revision(scene, old)}"
    )


def test_roles_can_change_from_both_phases_in_one_to_prefill_and_decode(scene: Scene, nodes: Nodes):
    pool = {"pools": [{"name": "cpu", "replicas": 1}]}
    scene.create(roles={"mixed": pool})
    scene.await_condition("Ready", "True")
    old = scene.revision
    nodes.rule = lambda pod: (
        ready(pod) if pod["metadata"]["labels"].get(REVISION) in (None, old) else None
    )
    scene.change(roles={"mixed": None, "prefill": pool, "decode": pool})
    scene.await_condition("Ready", "False", "RollingOut")
    service = scene.api.get(scene.path("Service", scene.name))
    assert service is not None
    # of the revision that still serves
    assert service["spec"]["selector"]["pdcluster.io/role"] == "mixed"
    nodes.rule = ready
    scene.await_condition("Ready", "True")
    service = scene.api.get(scene.path("Service", scene.name))
    assert service is not None
    assert service["spec"]["selector"]["pdcluster.io/role"] == "decode"


def test_the_same_pods_written_otherwise_and_an_edit_of_routers_replace_no_worker(
    scene: Scene, nodes: Nodes
):
    pools = {"pools": [{"name": "cpu", "replicas": 1}]}
    roles = {"prefill": pools, "decode": {**pools, "resources": {"limits": {"cpu": 1}}}}
    scene.create(roles={**roles, "router": pools}, image={"pullSecrets": ["a", "b"]})
    scene.await_condition("Ready", "True")
    pods, revision = scene.pods(), scene.status["revision"]
    limits = {"limits": {"cpu": "1000m"}}
    scene.change(roles={"decode": {"resources": limits}}, image={"pullSecrets": ["b", "a"]})
    scene.await_condition("Ready", "True")

    assert (scene.pods(), scene.status["revision"]) == (pods, revision)
    noted = {"podTemplate": {"metadata": {"annotations": {"team": "a"}}}}
    scene.change(roles={"router": noted})
    wait_for(
        lambda: len(pods.items() - scene.pods().items()) == 1,
        DEADLINE_SECONDS,
        lambda: f"one of {pods} replaced: {scene.pods()}",
    )
    scene.await_condition("Ready", "True")
    (name,) = (name for name, uid in pods.items() if scene.pods()[name] != uid)
    assert "-router-" in name
    assert scene.status["revision"] == revision
