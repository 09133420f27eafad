"""Notes that a peer sends of a request; what it says is shown, never acted on."""

from collections.abc import Sequence
from math import isfinite

from pdcluster_worker.messages.peers import Fact, PeerEvent

MAX_NOTES = 64
"""Taken of one message: a request has about ten."""

MAX_FACTS = 32
"""Taken of one note: about ten are in the longest."""

MAX_CHARACTERS = 1000
"""Taken of a name or a text."""


def sanitize_events(
    notes: Sequence[PeerEvent], began_seconds: float, worker: str
) -> tuple[PeerEvent, ...]:
    """The notes by our clock, bounded, without numbers that are not finite.

    began_seconds: of the call here, from which their seconds count, so no time is later than it
                   was.
    """
    return tuple(
        PeerEvent(
            note.name[:MAX_CHARACTERS],
            began_seconds + max(0.0, note.seconds),
            {
                name[:MAX_CHARACTERS]: _shown(fact)
                for name, fact in list(note.facts.items())[:MAX_FACTS]
                if not isinstance(fact, float) or isfinite(fact)
            },
            worker,
        )
        for note in notes[:MAX_NOTES]
        if isfinite(note.seconds)
    )


def _shown(fact: Fact) -> Fact:
    return fact[:MAX_CHARACTERS] if isinstance(fact, str) else fact
