"""The order of one sender's numbered events: which to take, and when some are missing.

Pure.  After a gap nothing is taken until the sender has sent a snapshot:
an index that missed a removal would promise a block that is gone.
"""

from enum import Enum


class GapCheck(Enum):
    """Treatment of an event.

    APPLY:    it is the next one, or a snapshot.
    SKIP:     it was taken before, or comes while a snapshot is awaited.
    GET_SNAPSHOT: events before it are missing: ask the sender for a snapshot.
    """

    APPLY = "take"
    SKIP = "pass"
    GET_SNAPSHOT = "ask snapshot"


class EventOrder:
    """Follows one sender from its first event, number 1, on."""

    def __init__(self) -> None:
        self._last = 0
        self._has_gap = False

    def arrival(self, number: int, *, is_whole: bool = False) -> GapCheck:
        """Note the event with this number.  is_whole: it is a snapshot and needs no
        earlier event.
        """
        if number <= self._last or (self._has_gap and not is_whole):
            return GapCheck.SKIP
        if number > self._last + 1 and not is_whole:
            self._has_gap = True
            return GapCheck.GET_SNAPSHOT
        self._last, self._has_gap = number, False
        return GapCheck.APPLY
