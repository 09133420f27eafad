"""Gates of a rolling roll out on a real API server: `pdctl rollout` holds it, lets it go on and
takes it back, and the spec stays as it is.  No worker answers here, so whether KV moves is unknown.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pdcluster_schema.labels import RETIRED, ROLLOUT
from pdctl.cli.main import app
from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.nodeless import Nodes
from tests.apiserver.operator_fixtures import SELDOM
from tests.apiserver.operator_process import OperatorProcess
from tests.apiserver.operator_stage import GROUP, Scene
from tests.apiserver.plain_api import PlainApi

_numbers = itertools.count(1)
NAMESPACE = "operator-gates"
SETTINGS = {"PDCLUSTER_RESYNC_SECONDS": SELDOM}
OTHER_ENGINE = {"maxBatchedTokens": 512}
GATED = {
    "strategy": "Rolling",
    "drainTimeoutSeconds": 1,  # no worker here says that it has drained
    "onFailure": "Pause",
    "bakeSeconds": 1,
}
Pdctl = Callable[..., Result]


@pytest.fixture
def scene(control_plane: ControlPlane, nodes: Nodes) -> Iterator[Scene]:
    """A cluster that is ready under its first revision."""
    found = Scene(PlainApi(control_plane.kubeconfig), NAMESPACE, f"chat-{next(_numbers)}")
    found.create(rollout=GATED)
    found.await_condition("Ready", "True")
    yield found
    found.delete()


@pytest.fixture
def pdctl(control_plane: ControlPlane, scene: Scene) -> Pdctl:
    options = ("--kubeconfig", str(control_plane.kubeconfig), "--namespace", NAMESPACE)
    return lambda verb: CliRunner().invoke(app, ["rollout", verb, scene.name, *options])


def sizes(scene: Scene, revision: str) -> dict[str, int]:
    return {
        name.split("-")[2]: body["spec"]["replicas"]
        for name, body in scene.children("StatefulSet").items()
        if revision in name
    }


def test_a_gate_of_unknown_facts_waits_and_is_passed_by_hand(scene: Scene, pdctl: Pdctl) -> None:
    old = scene.revision
    nothing = pdctl("resume")
    assert (nothing.exit_code, "is not paused: none of its roll outs" in nothing.stderr) == (
        1,
        True,
    )
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision

    found = scene.await_condition("RolloutPaused", "True", "GateUnknown")

    assert found["message"].startswith(f"step 1 of 2 of revision {new} waits at its gate: ")
    assert scene.condition("Ready")["reason"] == scene.condition("Stalled")["reason"]
    assert scene.condition("Serving")["status"] == "True"
    shown = pdctl("status")
    assert shown.exit_code == 1
    assert "gates: 0 of 2 have passed; Baking since " in shown.output
    history = pdctl("history").output
    assert [line.split()[0] for line in history.splitlines()[1:]].count(new) == 2
    for _ in range(2):
        before = scene.status["gate"]["passed"]
        assert pdctl("resume").exit_code == 0
        scene.until(lambda: scene.status.get("gate", {}).get("passed", 2) > before)  # noqa: B023
        if before == 0:
            scene.until(lambda: scene.condition("RolloutPaused").get("reason") == "GateUnknown")
    scene.await_condition("Ready", "True")
    assert sizes(scene, new) == {"prefill": 1, "decode": 2}
    scene.until(lambda: not sizes(scene, old))
    assert "gate" not in scene.status


def test_an_undo_brings_the_old_workers_back_and_the_spec_stays(
    scene: Scene, pdctl: Pdctl, operator: OperatorProcess
) -> None:
    old = scene.revision
    none = pdctl("undo")
    assert (none.exit_code, "has no history to go back to" in none.stderr) == (1, True)
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision
    scene.until(lambda: sizes(scene, new).get("decode") == 1)
    scene.until(lambda: scene.status.get("gate", {}).get("state") == "Baking")
    assert sizes(scene, old) == {"prefill": 1, "decode": 2}
    spec = scene.body["spec"]
    operator.kill()
    operator.start()

    assert pdctl("undo").exit_code == 0
    found = scene.await_condition("RolledBack", "True", "Undone")

    assert found["message"].startswith(f"revision {new} was rolled back to {old}: ")
    scene.until(lambda: not sizes(scene, new))
    scene.until(lambda: sizes(scene, old) == {"prefill": 1, "decode": 2})
    scene.await_condition("Ready", "False", "RolledBack")
    assert scene.body["spec"] == spec
    again = pdctl("undo")
    assert (again.exit_code, "is rolled back already" in again.stderr) == (1, True)
    assert f"revision {new} was rolled back at " in pdctl("history").output
    operator.kill()
    operator.start()
    scene.change(rollout={"drainTimeoutSeconds": 2})  # makes no other revision
    scene.await_condition("RolledBack", "True", "Undone")
    scene.settled_versions()
    assert not sizes(scene, new)

    scene.change(engine={"maxBatchedTokens": 384}, rollout={"onFailure": None, "bakeSeconds": None})
    scene.await_condition("Ready", "True")
    assert scene.condition("RolledBack") == {}


@pytest.mark.parametrize("strategy", ["Rolling", "BlueGreen", "Recreate"])
def test_an_undo_after_the_end_goes_back_from_snapshots(
    scene: Scene, pdctl: Pdctl, operator: OperatorProcess, strategy: str
) -> None:
    plain = {"strategy": strategy, "onFailure": None, "bakeSeconds": None}
    scene.change(rollout=plain)
    old = scene.revision
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision
    scene.await_condition("Ready", "True")
    scene.until(lambda: not sizes(scene, old))
    at_rest = scene.settled_versions()
    kept = {
        name: each for name, each in scene.children("ControllerRevision").items() if old in name
    }
    assert {each["metadata"]["labels"][RETIRED] for each in kept.values()} == {"true"}
    assert len(kept) == 2
    states = [line.split()[-1] for line in pdctl("history").output.splitlines()[1:]]
    assert sorted(states) == ["serves", "serves", "snapshot", "snapshot"]
    spec = scene.body["spec"]
    operator.kill()
    operator.start()
    assert scene.settled_versions() == at_rest

    undone = pdctl("undo")
    assert (undone.exit_code, f"goes back to revision {old}" in undone.output) == (0, True)
    operator.kill()
    operator.start()

    scene.await_condition("RolledBack", "True", "Undone")
    scene.until(lambda: sizes(scene, old) == {"prefill": 1, "decode": 2})
    scene.until(lambda: not sizes(scene, new))
    scene.await_condition("Ready", "False", "RolledBack")
    assert scene.body["spec"] == spec
    scene.settled_versions()
    assert sizes(scene, old) == {"prefill": 1, "decode": 2}

    scene.change(engine={"maxBatchedTokens": None})
    scene.await_condition("Ready", "True")
    assert scene.condition("RolledBack") == {}
    assert sizes(scene, old) == {"prefill": 1, "decode": 2}


def test_an_undo_by_hand_without_history_says_why(scene: Scene) -> None:
    command = f"undo {scene.body['metadata']['generation']}"
    patch = {"metadata": {"annotations": {ROLLOUT: command}}}
    scene.api.merge(f"{GROUP}/namespaces/{NAMESPACE}/pdclusters/{scene.name}", patch)

    found = scene.await_condition("RolledBack", "False", "NoHistory")

    assert f"no other revision than {scene.revision} has served" in found["message"]
    assert scene.condition("Ready")["status"] == "True"


def test_a_pause_needs_no_gates_and_holds_until_a_resume(scene: Scene, pdctl: Pdctl) -> None:
    scene.change(rollout={"onFailure": None, "bakeSeconds": None})
    assert pdctl("pause").exit_code == 0
    again = pdctl("pause")
    assert (again.exit_code, "is paused already" in again.stderr) == (1, True)
    scene.change(engine=OTHER_ENGINE)
    new = scene.revision

    scene.await_condition("RolloutPaused", "True", "PausedByUser")
    scene.until(lambda: sizes(scene, new).get("decode") == 1)

    assert pdctl("resume").exit_code == 0
    assert ROLLOUT not in (scene.body["metadata"].get("annotations") or {})
    scene.await_condition("Ready", "True")
    assert sizes(scene, new) == {"prefill": 1, "decode": 2}


def test_only_rolling_can_be_paused(scene: Scene, pdctl: Pdctl) -> None:
    scene.change(rollout={"strategy": "BlueGreen", "onFailure": None, "bakeSeconds": None})

    refused = pdctl("pause")

    assert refused.exit_code == 2
    assert "is BlueGreen, and only Rolling has steps" in refused.stderr
