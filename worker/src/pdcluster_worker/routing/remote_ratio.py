"""Share of remote prefills among recent long prompts; an idle worker keeps its last figures."""

from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 300.0
_SLICE_SECONDS = 30.0


@dataclass(slots=True)
class _TimeSlice:
    start: float
    num_long: int = 0
    num_remote: int = 0


class RemoteRatio:
    """One per decode worker.

    >>> share = RemoteRatio()
    >>> for second, is_remote in ((0, False), (100, True), (310, True)):
    ...     share.add(second, is_remote=is_remote)
    >>> share.num_long, share.num_remote
    (2, 2)
    """

    def __init__(self) -> None:
        self._slices: deque[_TimeSlice] = deque()

    def add(self, now: float, *, is_remote: bool) -> None:
        """now: seconds of a monotonic clock."""
        if not self._slices or now - self._slices[-1].start >= _SLICE_SECONDS:
            self._slices.append(_TimeSlice(now))
        self._slices[-1].num_long += 1
        self._slices[-1].num_remote += is_remote
        while now - self._slices[0].start >= WINDOW_SECONDS:
            self._slices.popleft()

    @property
    def num_long(self) -> int:
        return sum(each.num_long for each in self._slices)

    @property
    def num_remote(self) -> int:
        return sum(each.num_remote for each in self._slices)
