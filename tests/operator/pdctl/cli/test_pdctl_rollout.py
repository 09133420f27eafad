"""`pdctl rollout` over one object: what it shows, what it writes, and what it refuses."""

from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.errors import StartError
from pdcluster_api.manifests.objects import labels_of
from pdcluster_schema import conditions as words
from pdcluster_schema.labels import RETIRED, ROLLOUT
from pdcluster_schema.workload import WorkloadId
from pdctl.cli.present import present_lines
from pdctl.cli.rollout import RolloutView
from tests.operator.bodies import UID, child
from tests.schema.object_cases import minimal

SINCE = "2026-01-02T03:04:05Z"
ROLLING = {"revision": "b", "step": 1, "steps": 2}


def view(
    *,
    command: str = "",
    generation: int = 7,
    reason: str = "",
    strategy: str = "Rolling",
    snapshots: str = "",
    **status: Any,
) -> RolloutView:
    """An object that the operator has seen at generation 7.  snapshots: a revision of which they
    are kept
    """
    conditions = [
        {"type": kind, "status": "True", "reason": reason, "message": "why"}
        for kind in ([words.ROLLOUT_PAUSED] if reason else [])
    ]
    found = minimal()
    found["spec"]["rollout"] = {"strategy": strategy}
    kept = [
        WorkloadId("chat", role, "cpu", snapshots) for role in ("prefill", "decode") if snapshots
    ]
    marks = {each.name: {"labels": {**labels_of(each), RETIRED: "true"}} for each in kept}
    children = [child("ControllerRevision", name, metadata=each) for name, each in marks.items()]
    return RolloutView(
        Live(
            {
                **found,
                "metadata": {
                    "name": "chat",
                    "namespace": "default",
                    "uid": UID,
                    "generation": generation,
                    "annotations": {ROLLOUT: command} if command else {},
                },
                "status": {
                    "observedGeneration": 7,
                    "revision": "b",
                    "servingRevision": "a",
                    "conditions": conditions,
                    **status,
                },
            },
            children,
        )
    )


def gate(state: str, **fields: Any) -> dict[str, Any]:
    return {"revision": "b", "steps": 2, "passed": 1, "state": state, "since": SINCE, **fields}


@pytest.mark.parametrize("state", ["Failed", "RolledBack"])
def test_a_resume_names_the_gate_that_it_is_meant_for(state: str):
    assert view(gate=gate(state)).resumed() == f"resume {SINCE}"
    assert view(gate=gate(state), command="pause").resumed() == f"resume {SINCE}"


def test_a_resume_goes_past_a_gate_of_unknown_facts_and_ends_a_pause():
    assert view(gate=gate("Baking"), reason=words.GATE_UNKNOWN).resumed() == f"resume {SINCE}"
    assert view(gate=gate("Baking"), reason=words.PAUSED_BY_USER, command="pause").resumed() is None


@pytest.mark.parametrize(
    "found", [view(), view(gate=gate("Baking")), view(command="resume 2025-01-01T00:00:00Z")]
)
def test_what_is_not_paused_is_not_resumed(found: RolloutView):
    with pytest.raises(StartError, match="chat is not paused: none of its roll outs waits"):
        found.resumed()


def test_an_undo_is_of_the_generation_that_the_operator_has_seen():
    served = {"history": [{"revision": "b", "since": SINCE}, {"revision": "a", "since": SINCE}]}
    assert view(**served, snapshots="b").undone() == "undo 7"
    with pytest.raises(StartError, match="has not seen the newest spec of chat yet"):
        view(**served, snapshots="b", generation=8).undone()
    with pytest.raises(StartError, match="is rolled back already, to revision a; snapshots of"):
        view(rollout=ROLLING, gate=gate("RolledBack", to="a")).undone()


def test_an_undo_without_history_says_why():
    first = "chat has no history to go back to: no other revision than [0-9a-f]+ has served with"
    with pytest.raises(StartError, match=first):
        view().undone()
    served = {"history": [{"revision": "a", "since": SINCE}]}
    gone = "the snapshots of revision a are gone; apply the previous file"
    with pytest.raises(StartError, match=gone):
        view(**served).undone()


def test_the_history_has_the_snapshots_and_when_their_revision_was_whole():
    served = {"history": [{"revision": "a", "since": SINCE}]}

    lines = view(**served, snapshots="a").history_lines()

    assert [line.split() for line in lines] == [
        ["REVISION", "ROLE", "POOL", "WORKERS", "READY", "WHOLE", "SINCE", "STATE"],
        ["a", "decode", "cpu", "0", "0", SINCE, "snapshot"],
        ["a", "prefill", "cpu", "0", "0", SINCE, "snapshot"],
    ]


def test_a_pause_replaces_what_cannot_be_read_and_is_for_rolling_alone():
    assert view(command="paus").paused() == view().paused() == "pause"
    with pytest.raises(StartError, match="is paused already"):
        view(command="pause").paused()
    with pytest.raises(StartError, match="of chat is Recreate, and only Rolling has steps"):
        view(strategy="Recreate").paused()


def test_the_state_says_how_far_it_is_and_what_waits():
    found = list(view(rollout=ROLLING, gate=gate("Failed"), reason=words.GATE_FAILED).lines())

    assert found == [
        "chat: a is replaced, revision b comes: step 1 of 2",
        f"gates: 1 of 2 have passed; Failed since {SINCE}",
        "RolloutPaused True (GateFailed): why",
    ]
    assert list(view(gate=gate("RolledBack")).lines()) == [
        "chat: revision a serves, as it was rolled back to"
    ]
    assert list(view().lines()) == ["chat: no roll out is under way; revision a serves"]


@pytest.mark.parametrize("reason", [words.ROLLOUT_PAUSED, words.ROLLED_BACK])
def test_why_says_once_that_a_roll_out_waits_or_went_back(reason: str):
    stalled = {"type": "Stalled", "status": "True", "reason": reason, "message": "the figures"}
    body = {"status": {"conditions": [{**stalled, "lastTransitionTime": SINCE}]}}

    found = present_lines(body, (), datetime(2026, 1, 2, tzinfo=UTC))

    assert found == [f"Stalled ({reason}) since {SINCE}: the figures"]
