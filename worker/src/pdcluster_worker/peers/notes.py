"""Notes of a request across gRPC; what a peer says of it is shown, never acted on."""

from collections.abc import Iterable
from math import isfinite

from pdcluster_worker.messages.peers import Fact, Note
from pdcluster_worker.proto import worker_pb2 as pb

MAX_NOTES = 64
"""Taken of one message: a request has about ten."""

MAX_FACTS = 32
"""Taken of one note: about ten are in the longest."""

MAX_CHARACTERS = 1000
"""Taken of a name or a text."""


def notes_to_proto(notes: Iterable[Note]) -> list[pb.Note]:
    """Notes whose seconds count from the arrival of the call."""
    return [
        pb.Note(
            name=note.name,
            seconds=note.seconds,
            facts=[_to_proto(name, fact) for name, fact in note.facts.items()],
        )
        for note in notes
    ]


def notes_from_proto(
    messages: Iterable[pb.Note], began_seconds: float, worker: str
) -> tuple[Note, ...]:
    """The same by our clock, bounded, without numbers that are not finite.

    began_seconds: of the call here, so no time is later than it was.
    """
    taken = [message for message in list(messages)[:MAX_NOTES] if isfinite(message.seconds)]
    return tuple(
        Note(
            message.name[:MAX_CHARACTERS],
            began_seconds + max(0.0, message.seconds),
            {
                said.name[:MAX_CHARACTERS]: fact
                for said in message.facts[:MAX_FACTS]
                if (fact := _from_proto(said)) is not None
            },
            worker,
        )
        for message in taken
    )


def _to_proto(name: str, fact: Fact) -> pb.Fact:
    match fact:
        case bool():
            return pb.Fact(name=name, truth=fact)
        case int():
            return pb.Fact(name=name, integer=fact)
        case float():
            return pb.Fact(name=name, real=fact)
        case str():
            return pb.Fact(name=name, text=fact)


def _from_proto(message: pb.Fact) -> Fact | None:
    match message.WhichOneof("fact"):
        case "truth":
            return message.truth
        case "integer":
            return message.integer
        case "real":
            return message.real if isfinite(message.real) else None
        case "text":
            return message.text[:MAX_CHARACTERS]
        case _:
            return None
