"""A peer's notes of a request are taken as far as they can be shown."""

from math import inf, nan

from pdcluster_worker.peers.notes import MAX_CHARACTERS, MAX_FACTS, MAX_NOTES, notes_from_proto
from pdcluster_worker.proto import worker_pb2 as pb


def fact(number: int) -> pb.Fact:
    return pb.Fact(name=f"f{number}", integer=number)


def test_numbers_without_an_end_are_left_out() -> None:
    facts = [
        pb.Fact(name="cost", real=nan),
        pb.Fact(name="rate", real=inf),
        pb.Fact(name="share", real=0.5),
    ]
    notes = notes_from_proto(
        [pb.Note(name="late", seconds=inf), pb.Note(name="offload", seconds=0.5, facts=facts)],
        10.0,
        "d1",
    )

    assert [(note.name, note.seconds, note.facts) for note in notes] == [
        ("offload", 10.5, {"share": 0.5})
    ]


def test_number_and_length_of_what_a_peer_says_are_bounded() -> None:
    text = [pb.Fact(name="n" * 9999, text="t" * 9999)]
    said = [
        pb.Note(name="n" * 9999, facts=text),
        pb.Note(facts=[fact(number) for number in range(2 * MAX_FACTS)]),
    ]
    first, second, *others = notes_from_proto([*said, *[pb.Note()] * 999], 0.0, "d1")

    assert (first.name, first.facts) == (
        "n" * MAX_CHARACTERS,
        {"n" * MAX_CHARACTERS: "t" * MAX_CHARACTERS},
    )
    assert len(second.facts) == MAX_FACTS
    assert len(others) == MAX_NOTES - 2
