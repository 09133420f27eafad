"""Journeys kept of requests that have ended, and their output."""

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.peers import TraceEvent
from pdcluster_worker.tracing.request_trace import (
    MAX_EVENTS,
    RecentTraces,
    RequestTrace,
    add_event,
    add_event_at,
    as_json,
    begin_trace,
    merge_events,
    route_of,
)

ID = 32 * "a"


def test_journeys_find_a_request_by_each_of_its_ids() -> None:
    traces = RecentTraces()
    with traces.of(ID, role="ingress"):
        add_event("decode", worker="d0")
    with traces.of(f"cmpl-{ID}-0", role="decode"):
        pass

    for request_id in (ID, f"cmpl-{ID}", f"chatcmpl-{ID}-1"):
        assert [trace.request_id for trace in traces.find(request_id)] == [ID, f"cmpl-{ID}-0"]
    assert [event.name for event in traces.find(ID)[0].events] == ["issued", "decode"]
    assert traces.find(32 * "b") == []


def test_journeys_forget_the_oldest() -> None:
    traces = RecentTraces(kept=2)
    for number in range(3):
        with traces.of(f"r{number}"):
            pass

    assert [bool(traces.find(f"r{number}")) for number in range(3)] == [False, True, True]


def test_journeys_are_bounded_when_all_are_of_one_request() -> None:
    traces = RecentTraces(kept=3)
    with traces.of("r0"):
        pass
    for choice in range(5):
        with traces.of(f"cmpl-{ID}-{choice}"):
            pass

    assert traces.find("r0") == []
    assert [trace.request_id for trace in traces.find(ID)] == [
        f"cmpl-{ID}-{choice}" for choice in (2, 3, 4)
    ]


def test_journey_of_many_choices_is_bounded_and_keeps_its_end() -> None:
    with begin_trace("r") as trace:
        for number in range(2 * MAX_EVENTS):
            add_event_at("offload", trace.began_seconds, number=number)
        merge_events([TraceEvent("odd", 1e9, {}, "d1")] * MAX_EVENTS)
        add_event("answered", status=200)

    assert len(trace.events) == MAX_EVENTS
    assert [trace.events[0].facts, trace.events[-1].facts] == [{"number": 0}, {"status": 200}]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestError("no room", status=503, code="queue_full"), "queue_full"),
        (RequestError("bad"), "400"),
        (OSError("x"), "OSError"),
    ],
)
def test_journey_of_a_failure_says_its_reason(error: Exception, reason: str) -> None:
    traces, ended = RecentTraces(), list[RequestTrace]()
    traces.on_end = ended.append
    with pytest.raises(type(error)), traces.of("r"):
        raise error

    assert ended == traces.find("r")
    assert ended[0].events[-1].facts == {"reason": reason, "message": str(error)}


def test_journey_tells_what_is_new_and_a_reader_knows_whose_it_is() -> None:
    with begin_trace("at the peer") as there:
        add_event_at("issued", there.began_seconds)
        add_event_at("offload", there.began_seconds + 1.0, remote=False)
        first = there.take()
        add_event_at("decoding_end", there.began_seconds + 2.0)

        assert [(told.name, told.seconds) for told in first] == [
            ("received", 0.0),
            ("offload", 1.0),
        ]
        assert [told.name for told in there.take()] == ["decoding_end"]
        assert there.take() == ()
    with begin_trace("here") as local:
        merge_events([TraceEvent("offload", 7.0, {"remote": False}, "d1")])

        assert local.events == [TraceEvent("offload", 7.0, {"remote": False}, "d1")]
        assert local.take() == ()  # what a peer said is not passed on as our own


def test_lifetime_events_never_go_back_in_time() -> None:
    with begin_trace("r") as trace:
        add_event_at("context_begin", trace.began_seconds - 5.0)
        add_event_at("context_end", trace.began_seconds + 2.0)
        add_event_at("migration_begin", trace.began_seconds + 1.0)

    assert [event.seconds - trace.began_seconds for event in trace.events] == [0.0, 2.0, 2.0]


def test_route_is_a_header_whatever_was_noted() -> None:
    trace = RequestTrace("r", [TraceEvent("decode", 1.0, {"worker": "a\r\nb", "text": "é" * 3000})])

    header = route_of(trace)

    assert header.isascii()
    assert "\n" not in header
    assert header.startswith("decode worker=a_b text=_")


def test_route_is_a_header_whatever_a_peer_notes() -> None:
    trace = RequestTrace(
        "r", [TraceEvent("a\r\nb", 1.0, {"é\n": 1}, "d1"), TraceEvent("context_end", 2.0, {}, "d1")]
    )

    assert route_of(trace) == "a_b at=d1 _=1"


def test_json_of_a_journey_counts_from_its_beginning() -> None:
    trace = RequestTrace(
        "r",
        [TraceEvent("b", 12.5, {"n": 1}), TraceEvent("a", 11.0, {}, "d1")],
        began_seconds=10.0,
        began_unix=1.0,
    )

    assert as_json(trace) == {
        "request_id": "r",
        "began_unix": 1.0,
        "events": [
            {"name": "a", "seconds": 1.0, "worker": "d1", "facts": {}},
            {"name": "b", "seconds": 2.5, "worker": "", "facts": {"n": 1}},
        ],
    }
