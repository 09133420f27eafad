"""Index of the prefixes that were recently sent to each worker: approximate, without events.

A prompt that was sent to a worker is in its cache, or about to be, for
`seconds`: so says the index where a worker sends no events, and where its
events are not here yet.  It errs after an eviction, which it cannot know of.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

RECENT_SECONDS = 120.0
"""Time for which a prefix counts as recent."""

MAX_RECENT_BLOCKS = 500_000
"""Blocks noted at most, one for each block and worker; beyond it the oldest are forgotten."""


class RecentPrefixes:
    """Blocks that were sent to each worker, and when.

    Times are seconds of a clock that only goes forward.

    >>> recent = RecentPrefixes(seconds=120.0)
    >>> recent.note("d0", [b"a", b"b"], now=0.0)
    >>> recent.note("d1", [b"a"], now=60.0)
    >>> recent.match_all([b"a", b"b", b"c"], now=120.0)
    {'d0': 2, 'd1': 1}
    >>> recent.match_all([b"a", b"b", b"c"], now=121.0)
    {'d1': 1}
    """

    def __init__(
        self, seconds: float = RECENT_SECONDS, max_blocks: int = MAX_RECENT_BLOCKS
    ) -> None:
        self.seconds = seconds
        self._max_blocks = max_blocks
        # when each block was last sent to each worker
        self._sent: dict[bytes, dict[str, float]] = {}
        self._dropped: dict[str, float] = {}  # when a worker's cache was last known to be empty
        self._order: deque[tuple[float, bytes, str]] = deque()

    def __len__(self) -> int:
        """Notes held, of the same block and worker too."""
        return len(self._order)

    def note(self, worker: str, hashes: Sequence[bytes], now: float) -> None:
        """A prompt of these blocks is sent to a worker."""
        for block in hashes:
            self._sent.setdefault(block, {})[worker] = now
            self._order.append((now, block, worker))
        while self._order and (
            len(self._order) > self._max_blocks or now - self._order[0][0] > self.seconds
        ):
            self._forget(*self._order.popleft())

    def match_all(
        self, hashes: Sequence[bytes], now: float, within: float | None = None
    ) -> dict[str, int]:
        """Leading blocks that were recently sent to each worker; workers with none are left out.

        within: seconds that count as late; by default, and at most, all that is kept.
        """
        since = now - (self.seconds if within is None else min(within, self.seconds))
        first = self._sent.get(hashes[0], {}) if hashes else {}
        return {
            worker: num_blocks
            for worker in first
            if (
                num_blocks := self._match(
                    worker, hashes, max(since, self._dropped.get(worker, since))
                )
            )
        }

    def _match(self, worker: str, hashes: Sequence[bytes], since: float) -> int:
        """Leading blocks that were sent to one worker at that time or later."""
        sent = self._sent
        for num_before, block in enumerate(hashes):
            workers = sent.get(block)
            if workers is None or workers.get(worker, -inf) < since:
                return num_before
        return len(hashes)

    def drop(self, worker: str, now: float) -> None:
        """Forget what was sent to a worker before: its cache is gone."""
        self._dropped[worker] = now
        for key in [key for key, when in self._dropped.items() if now - when > self.seconds]:
            del self._dropped[key]

    def _forget(self, when: float, block: bytes, worker: str) -> None:
        """Let go of a note, unless the same block went to the same worker again since."""
        workers = self._sent.get(block, {})
        if workers.get(worker) == when:
            del workers[worker]
            if not workers:
                del self._sent[block]
