"""The Event object; posting it is in tests/apiserver."""

from datetime import UTC, datetime

import pytest

from pdcluster_api.plan.result import PlannedEvent
from pdcluster_operator.reconcile.statuses import MAX_NOTE_BYTES, event_object

ABOUT = {
    "apiVersion": "pdcluster.io/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "chat", "namespace": "default", "uid": "u"},
}
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


def test_event_says_what_happened_to_what():
    body = event_object(ABOUT, PlannedEvent("Scaled", "decode/cpu from 1 to 2"), "operator-0", NOW)
    assert body["eventTime"] == "2026-01-02T03:04:05.000006Z"
    assert (body["type"], body["reason"], body["note"]) == (
        "Normal",
        "Scaled",
        "decode/cpu from 1 to 2",
    )
    assert body["regarding"] == {
        **{key: ABOUT[key] for key in ("apiVersion", "kind")},
        **ABOUT["metadata"],
    }
    assert body["metadata"]["namespace"] == "default"


def test_event_of_a_warning():
    assert (
        event_object(ABOUT, PlannedEvent("NameTaken", "x", warning=True), "operator-0", NOW)["type"]
        == "Warning"
    )


def test_event_has_one_name_for_one_change():
    one = event_object(ABOUT, PlannedEvent("Scaled", "x"), "operator-0", NOW)["metadata"]["name"]
    assert (
        event_object(ABOUT, PlannedEvent("Scaled", "x"), "operator-0", NOW)["metadata"]["name"]
        == one
    )
    assert (
        event_object(ABOUT, PlannedEvent("Scaled", "y"), "operator-0", NOW)["metadata"]["name"]
        != one
    )


@pytest.mark.parametrize("message", ["x" * 5000, "ü" * 5000, "x" * MAX_NOTE_BYTES])
def test_event_note_fits(message: str):
    note = event_object(ABOUT, PlannedEvent("Scaled", message), "operator-0", NOW)["note"]
    assert len(note.encode()) <= MAX_NOTE_BYTES
    assert note == message or note.endswith("...")
