"""The trace context of a client goes on to peers only as gRPC can carry it."""

import pytest

from pdcluster_worker.tracing import trace_context

PARENT = f"00-{32 * 'a'}-{16 * 'b'}-01"
LATER = f"01-{32 * 'a'}-{16 * 'b'}-01"


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=b,c=d", "a=b,c=d"),
        ("a=\xe9", ""),
        ("a=b\tc", ""),
        ("a=b," + 508 * "c", "a=b," + 508 * "c"),
        ("a=b," + 509 * "c", "a=b"),
        (9000 * "c", ""),
    ],
)
def test_state_that_is_no_metadata_is_left_out(state: str, kept: str) -> None:
    trace_context.enter(PARENT, state)

    assert trace_context.current() == (
        {"traceparent": PARENT, "tracestate": kept} if kept else {"traceparent": PARENT}
    )


@pytest.mark.parametrize(
    ("more", "is_taken"),
    [("", True), ("-more", True), ("-\xe9", False), ("- ", False), ("-" + 9000 * "a", False)],
)
def test_parent_of_a_later_version_is_taken_if_it_is_metadata(more: str, is_taken: bool) -> None:
    trace_context.enter(LATER + more)

    assert trace_context.current() == ({"traceparent": LATER + more} if is_taken else {})
