"""Journeys kept of requests that have ended, and their output."""

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.journeys.journey import (
    MAX_EVENTS,
    Event,
    Journey,
    adopt,
    begun,
    note,
    note_at,
)
from pdcluster_worker.journeys.recent import Journeys, as_json, route_of
from pdcluster_worker.messages.peers import Note

ID = 32 * "a"


def test_journeys_find_a_request_by_each_of_its_ids() -> None:
    journeys = Journeys()
    with journeys.of(ID, role="ingress"):
        note("decode", worker="d0")
    with journeys.of(f"cmpl-{ID}-0", role="decode"):
        pass

    for request_id in (ID, f"cmpl-{ID}", f"chatcmpl-{ID}-1"):
        assert [journey.request_id for journey in journeys.find(request_id)] == [ID, f"cmpl-{ID}-0"]
    assert [event.name for event in journeys.find(ID)[0].events] == ["issued", "decode"]
    assert journeys.find(32 * "b") == []


def test_journeys_forget_the_oldest() -> None:
    journeys = Journeys(kept=2)
    for number in range(3):
        with journeys.of(f"r{number}"):
            pass

    assert [bool(journeys.find(f"r{number}")) for number in range(3)] == [False, True, True]


def test_journeys_are_bounded_when_all_are_of_one_request() -> None:
    journeys = Journeys(kept=3)
    with journeys.of("r0"):
        pass
    for choice in range(5):
        with journeys.of(f"cmpl-{ID}-{choice}"):
            pass

    assert journeys.find("r0") == []
    assert [journey.request_id for journey in journeys.find(ID)] == [
        f"cmpl-{ID}-{choice}" for choice in (2, 3, 4)
    ]


def test_journey_of_many_choices_is_bounded_and_keeps_its_end() -> None:
    with begun("r") as journey:
        for number in range(2 * MAX_EVENTS):
            note_at("offload", journey.began_seconds, number=number)
        adopt([Note("odd", 1e9, {}, "d1")] * MAX_EVENTS)
        note("answered", status=200)

    assert len(journey.events) == MAX_EVENTS
    assert [journey.events[0].facts, journey.events[-1].facts] == [{"number": 0}, {"status": 200}]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestError("no room", status=503, code="queue_full"), "queue_full"),
        (RequestError("bad"), "400"),
        (OSError("x"), "OSError"),
    ],
)
def test_journey_of_a_failure_says_its_reason(error: Exception, reason: str) -> None:
    journeys, ended = Journeys(), list[Journey]()
    journeys.on_end = ended.append
    with pytest.raises(type(error)), journeys.of("r"):
        raise error

    assert ended == journeys.find("r")
    assert ended[0].events[-1].facts == {"reason": reason, "message": str(error)}


def test_journey_tells_what_is_new_and_a_reader_knows_whose_it_is() -> None:
    with begun("at the peer") as there:
        note_at("issued", there.began_seconds)
        note_at("offload", there.began_seconds + 1.0, remote=False)
        first = there.take()
        note_at("decoding_end", there.began_seconds + 2.0)

        assert [(told.name, told.seconds) for told in first] == [
            ("received", 0.0),
            ("offload", 1.0),
        ]
        assert [told.name for told in there.take()] == ["decoding_end"]
        assert there.take() == ()
    with begun("here") as here:
        adopt([Note("offload", 7.0, {"remote": False}, "d1")])

        assert here.events == [Event("offload", 7.0, {"remote": False}, "d1")]
        assert here.take() == ()  # what a peer said is not passed on as our own


def test_lifetime_events_never_go_back_in_time() -> None:
    with begun("r") as journey:
        note_at("context_begin", journey.began_seconds - 5.0)
        note_at("context_end", journey.began_seconds + 2.0)
        note_at("migration_begin", journey.began_seconds + 1.0)

    assert [event.seconds - journey.began_seconds for event in journey.events] == [0.0, 2.0, 2.0]


def test_route_is_a_header_whatever_was_noted() -> None:
    journey = Journey("r", [Event("decode", 1.0, {"worker": "a\r\nb", "text": "é" * 3000})])

    header = route_of(journey)

    assert header.isascii()
    assert "\n" not in header
    assert header.startswith("decode worker=a_b text=_")


def test_route_is_a_header_whatever_a_peer_notes() -> None:
    journey = Journey(
        "r", [Event("a\r\nb", 1.0, {"é\n": 1}, "d1"), Event("context_end", 2.0, {}, "d1")]
    )

    assert route_of(journey) == "a_b at=d1 _=1"


def test_json_of_a_journey_counts_from_its_beginning() -> None:
    journey = Journey(
        "r",
        [Event("b", 12.5, {"n": 1}), Event("a", 11.0, {}, "d1")],
        began_seconds=10.0,
        began_unix=1.0,
    )

    assert as_json(journey) == {
        "request_id": "r",
        "began_unix": 1.0,
        "events": [
            {"name": "a", "seconds": 1.0, "worker": "d1", "facts": {}},
            {"name": "b", "seconds": 2.5, "worker": "", "facts": {"n": 1}},
        ],
    }
