"""A peer's notes of a request are taken as far as they can be shown."""

from math import inf, nan

from pdcluster_worker.messages.peers import PeerEvent
from pdcluster_worker.peers.peer_events import MAX_CHARACTERS, MAX_FACTS, MAX_NOTES, sanitize_events


def test_numbers_without_an_end_are_left_out() -> None:
    facts = {"cost": nan, "rate": inf, "share": 0.5, "queue": 2, "is_last": True}
    notes = sanitize_events(
        [PeerEvent("late", inf, {}), PeerEvent("offload", 0.5, facts)], 10.0, "d1"
    )

    assert notes == (PeerEvent("offload", 10.5, {"share": 0.5, "queue": 2, "is_last": True}, "d1"),)


def test_number_and_length_of_what_a_peer_says_are_bounded() -> None:
    said = [
        PeerEvent("n" * 9999, 0.0, {"n" * 9999: "t" * 9999}),
        PeerEvent("many", 0.0, {f"f{number}": number for number in range(2 * MAX_FACTS)}),
    ]
    first, second, *others = sanitize_events([*said, *[PeerEvent("", 0.0, {})] * 999], 0.0, "d1")

    assert (first.name, first.facts) == (
        "n" * MAX_CHARACTERS,
        {"n" * MAX_CHARACTERS: "t" * MAX_CHARACTERS},
    )
    assert len(second.facts) == MAX_FACTS
    assert len(others) == MAX_NOTES - 2
