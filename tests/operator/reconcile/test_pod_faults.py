"""Why a StatefulSet gets no pods: asked only after it has been short of them for a while, and told without the pod's name."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdcluster_operator.cluster.observe import Live
from pdcluster_operator.reconcile.pod_faults import LOOK_AGAIN_SECONDS, SHORT_SECONDS, PodFaults, fault_of
from tests.operator.reconcile import bodies as made

QUOTA = (
    'create Pod chat-0 in StatefulSet chat failed error: pods "chat-0" is forbidden: exceeded quota: few, requested: pods=1, used: pods=2'
)


class WrittenEvents:
    """A client whose only objects are events."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events, self.num_lists = events, 0

    async def list(self, kind: object, namespace: str, *, fields: str) -> AsyncIterator[dict[str, Any]]:
        assert (namespace, "involvedObject.name=chat-decode" in fields) == ("default", True)
        self.num_lists += 1
        for event in self.events:
            yield event


def live(current: int, desired: int = 2) -> Live:
    stateful_set = made.child("StatefulSet", "chat-decode", spec={"replicas": desired}, status={"replicas": current})
    return Live(made.cluster(), [stateful_set])


def at(second: int, message: str) -> dict[str, Any]:
    return {"metadata": {}, "lastTimestamp": f"2026-01-01T00:00:{second:02}Z", "message": message}


async def test_a_set_that_has_its_pods_is_not_asked_about():
    client = WrittenEvents()
    assert await PodFaults(client).of(live(2)) == ({}, None)  # type: ignore[arg-type]
    assert client.num_lists == 0


async def test_a_set_is_asked_about_only_when_it_stays_short_and_the_newest_event_counts():
    client, now = WrittenEvents(at(1, "failed error: old"), at(9, QUOTA), at(5, "failed error: older")), 100.0
    faults = PodFaults(client, clock=lambda: now)  # type: ignore[arg-type]
    assert await faults.of(live(0)) == ({}, SHORT_SECONDS)
    assert client.num_lists == 0
    now += SHORT_SECONDS
    found, look_again = await faults.of(live(0))
    assert found["chat-decode"][0] == "QuotaExceeded"
    assert (look_again, client.num_lists) == (LOOK_AGAIN_SECONDS, 1)
    assert await faults.of(live(2)) == ({}, None)
    assert await faults.of(live(0)) == ({}, SHORT_SECONDS)  # the time starts anew


async def test_a_set_without_an_event_has_no_fault():
    now = 0.0
    faults = PodFaults(WrittenEvents(), clock=lambda: now)  # type: ignore[arg-type]
    await faults.of(live(0))
    now += SHORT_SECONDS
    assert (await faults.of(live(0)))[0] == {}


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (QUOTA, ("QuotaExceeded", "a pod is forbidden: exceeded quota: few, requested: pods=1, used: pods=2")),
        (
            'create Pod c-1 in StatefulSet c failed error: admission webhook "x" denied the request',
            ("PodsRefused", 'admission webhook "x" denied the request'),
        ),
        ("something unforeseen", ("PodsRefused", "something unforeseen")),
    ],
)
def test_the_message_says_what_is_wrong_and_not_which_pod_was_tried(message: str, fault: tuple[str, str]):
    assert fault_of(message) == fault
