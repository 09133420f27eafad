"""Sequence check of one sender's numbered events; after a gap only a snapshot counts."""

from enum import Enum


class GapCheck(Enum):
    """SKIP: already applied, or before the snapshot that closes a gap."""

    APPLY = "take"
    SKIP = "pass"
    GET_SNAPSHOT = "ask snapshot"


class EventOrder:
    def __init__(self) -> None:
        self._last = 0
        self._has_gap = False

    def arrival(self, number: int, *, is_whole: bool = False) -> GapCheck:
        """is_whole: the event is a snapshot and needs no earlier one."""
        if number <= self._last or (self._has_gap and not is_whole):
            return GapCheck.SKIP
        if number > self._last + 1 and not is_whole:
            self._has_gap = True
            return GapCheck.GET_SNAPSHOT
        self._last, self._has_gap = number, False
        return GapCheck.APPLY
