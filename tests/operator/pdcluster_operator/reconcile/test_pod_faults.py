"""Reason why a StatefulSet gets no pods: asked only after a time of shortage, and reported without
the pod's name.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from pdcluster_api.apiserver.container_ends import refusal_of
from pdcluster_api.apiserver.errors import ClusterError, ForbiddenError, UnavailableError
from pdcluster_api.apiserver.observe import Live
from pdcluster_operator.reconcile.pod_faults import (
    EVENTS_KEPT_SECONDS,
    EVENTS_POLL_SECONDS,
    MAX_EVENTS_POLL_SECONDS,
    SHORTAGE_GRACE_SECONDS,
    SKEW_SECONDS,
    FailedCreates,
    PodFaults,
)
from tests.operator import bodies as made

QUOTA = (
    'create Pod chat-0 in StatefulSet chat failed error: pods "chat-0" is forbidden: exceeded '
    "quota: few, requested: pods=1, used: pods=2"
)


class WrittenEvents:
    """A client whose only objects are events."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events, self.num_lists = events, 0

    async def list(
        self, kind: object, namespace: str, *, fields: str
    ) -> AsyncIterator[dict[str, Any]]:
        assert (namespace, fields) == (
            "default",
            "involvedObject.kind=StatefulSet,reason=FailedCreate",
        )
        self.num_lists += 1
        for event in self.events:
            yield event


def live(current: int, desired: int = 2, name: str = "chat-decode", **metadata: Any) -> Live:
    stateful_set = made.child(
        "StatefulSet",
        name,
        metadata=metadata,
        spec={"replicas": desired},
        status={"replicas": current},
    )
    return Live(made.cluster(), [stateful_set])


def at(second: int, message: str, name: str = "chat-decode") -> dict[str, Any]:
    when = f"2026-01-01T00:00:{second:02}Z"
    return {
        "metadata": {},
        "involvedObject": {"name": name, "uid": f"uid-of-{name}"},
        "lastTimestamp": when,
        "message": message,
    }


class RefusedEvents(WrittenEvents):
    """Events that the API server does not return."""

    def __init__(self, error: ClusterError) -> None:
        super().__init__()
        self.error = error

    async def list(
        self, kind: object, namespace: str, *, fields: str
    ) -> AsyncIterator[dict[str, Any]]:
        raise self.error
        yield {}


async def test_events_of_a_set_that_has_its_pods_are_not_read():
    client = WrittenEvents()
    assert await PodFaults(FailedCreates(client)).of(live(2)) == ({}, None)
    assert client.num_lists == 0


async def test_a_set_that_is_being_deleted_is_not_short_of_pods():
    client = WrittenEvents(at(9, QUOTA))
    assert await PodFaults(FailedCreates(client)).of(
        live(0, deletionTimestamp="2026-01-01T00:00:00Z")
    ) == ({}, None)
    assert client.num_lists == 0


async def test_events_of_a_set_are_read_only_when_it_stays_short_and_the_newest_counts():
    client, now = (
        WrittenEvents(at(1, "failed error: old"), at(9, QUOTA), at(5, "failed error: older")),
        100.0,
    )
    faults = PodFaults(FailedCreates(client, clock=lambda: now), clock=lambda: now)
    assert await faults.of(live(0)) == ({}, SHORTAGE_GRACE_SECONDS)
    assert client.num_lists == 0
    now += SHORTAGE_GRACE_SECONDS
    found, requeue_after = await faults.of(live(0))
    assert found["chat-decode"][0] == "QuotaExceeded"
    assert (requeue_after, client.num_lists) == (EVENTS_POLL_SECONDS, 1)
    assert await faults.of(live(2)) == ({}, None)
    assert await faults.of(live(0)) == ({}, SHORTAGE_GRACE_SECONDS)  # the time starts again


async def test_events_of_an_earlier_shortage_or_of_an_object_of_the_same_name_do_not_count():
    since = datetime(2026, 1, 1, 0, 10, tzinfo=UTC).timestamp()
    now = since
    client = WrittenEvents(
        {**at(0, QUOTA), "involvedObject": {"name": "chat-decode", "uid": "uid-of-one-before"}}
    )
    faults = PodFaults(
        FailedCreates(client, clock=lambda: now),
        clock=lambda: now,
        now=lambda: datetime.fromtimestamp(now, UTC),
    )
    await faults.of(live(0))
    now += SHORTAGE_GRACE_SECONDS
    assert (await faults.of(live(0)))[0] == {}
    client.events, now = (at(9, QUOTA),), now + EVENTS_KEPT_SECONDS
    assert (await faults.of(live(0)))[0] != {}  # its beginning was not seen: the event may show it
    await faults.of(live(2))
    since = now
    await faults.of(live(0))
    now += SHORTAGE_GRACE_SECONDS
    assert (await faults.of(live(0)))[0] == {}  # the event is of the time before it had its pods
    newer = datetime.fromtimestamp(since - SKEW_SECONDS + 1, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    client.events, now = ({**at(0, QUOTA), "lastTimestamp": newer},), now + EVENTS_KEPT_SECONDS
    assert (await faults.of(live(0)))[0] != {}


async def test_events_that_may_not_be_read_are_reported_and_stop_nothing():
    now = 0.0
    faults = PodFaults(
        FailedCreates(
            RefusedEvents(ForbiddenError("User x cannot list resource events")), clock=lambda: now
        ),
        clock=lambda: now,
    )
    await faults.of(live(0))
    now += SHORTAGE_GRACE_SECONDS
    found, requeue_after = await faults.of(live(0))
    reason, message = found["chat-decode"]
    assert (reason, requeue_after) == ("PodsRefused", EVENTS_POLL_SECONDS)
    assert "User x cannot list resource events; give it to the operator's ServiceAccount" in message


async def test_a_server_that_is_away_is_for_another_pass():
    now = 0.0
    faults = PodFaults(
        FailedCreates(RefusedEvents(UnavailableError("away")), clock=lambda: now), clock=lambda: now
    )
    await faults.of(live(0))
    now += SHORTAGE_GRACE_SECONDS
    with pytest.raises(UnavailableError):
        await faults.of(live(0))


async def test_an_event_without_a_message_says_nothing():
    now = 0.0
    event = at(1, "")
    del event["message"]
    faults = PodFaults(FailedCreates(WrittenEvents(event), clock=lambda: now), clock=lambda: now)
    await faults.of(live(0))
    now += SHORTAGE_GRACE_SECONDS
    assert (await faults.of(live(0)))[0] == {}


async def test_a_set_without_an_event_has_no_fault():
    now = 0.0
    faults = PodFaults(FailedCreates(WrittenEvents(), clock=lambda: now), clock=lambda: now)
    await faults.of(live(0))
    now += SHORTAGE_GRACE_SECONDS
    assert (await faults.of(live(0)))[0] == {}


async def test_all_sets_of_a_namespace_share_what_was_read_for_some_seconds():
    client, now = WrittenEvents(at(1, "one"), at(1, "two", "chat-prefill")), 0.0
    faults = PodFaults(FailedCreates(client, clock=lambda: now), clock=lambda: now)
    both = Live(made.cluster(), [*live(0).children, *live(0, name="chat-prefill").children])
    await faults.of(both)
    now += SHORTAGE_GRACE_SECONDS
    found, _ = await faults.of(both)
    assert {name: message for name, (_, message) in found.items()} == {
        "chat-decode": "one",
        "chat-prefill": "two",
    }
    assert (await faults.of(both))[0] == found
    assert client.num_lists == 1
    client.events, now = (at(9, "three"),), now + EVENTS_KEPT_SECONDS
    found, _ = await faults.of(both)
    assert {name: message for name, (_, message) in found.items()} == {"chat-decode": "three"}
    assert client.num_lists == 2


async def test_what_stays_short_is_looked_at_ever_more_seldom_up_to_a_bound():
    now = 0.0
    faults = PodFaults(FailedCreates(WrittenEvents(), clock=lambda: now), clock=lambda: now)
    waits = []
    for _ in range(8):
        _, requeue_after = await faults.of(live(0))
        assert requeue_after is not None
        waits.append(requeue_after)
        now += requeue_after
    assert waits == [3.0, EVENTS_POLL_SECONDS, 18.0, 36.0, 72.0, *[MAX_EVENTS_POLL_SECONDS] * 3]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (
            QUOTA,
            (
                "QuotaExceeded",
                "a pod is forbidden: exceeded quota: few, requested: pods=1, used: pods=2",
            ),
        ),
        (
            'create Pod c-1 in StatefulSet c failed error: admission webhook "x" denied the '
            "request",
            ("PodsRefused", 'admission webhook "x" denied the request'),
        ),
        ("something unforeseen", ("PodsRefused", "something unforeseen")),
    ],
)
def test_the_message_says_what_is_wrong_and_not_which_pod_was_tried(
    message: str, fault: tuple[str, str]
):
    assert refusal_of(message) == fault
