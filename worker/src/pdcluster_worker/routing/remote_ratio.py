"""Places where the recent long prompts of a decode worker were prefilled: their number, and the
share that went to prefill workers.

Pure.  The window ends at the newest long prompt, not now: a worker without traffic goes on saying
what it last saw, so that a quiet night does not look like a change.  Counted in slices, so that its
size does not depend on the load.
"""

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
        """Count a long prompt that has been prefilled.  now: seconds of a clock that only goes
        forward.
        """
        if not self._slices or now - self._slices[-1].start >= _SLICE_SECONDS:
            self._slices.append(_TimeSlice(now))
        self._slices[-1].num_long += 1
        self._slices[-1].num_remote += is_remote
        while now - self._slices[0].start >= WINDOW_SECONDS:
            self._slices.popleft()

    @property
    def num_long(self) -> int:
        """Long prompts in the window."""
        return sum(each.num_long for each in self._slices)

    @property
    def num_remote(self) -> int:
        """Those of them that a prefill worker computed."""
        return sum(each.num_remote for each in self._slices)
