"""Approximate prefix index without events: what was recently sent to a worker is in its cache."""

from collections import deque
from collections.abc import Sequence
from math import inf

RECENT_SECONDS = 120.0

MAX_RECENT_BLOCKS = 500_000  # (block, worker) pairs; beyond it the oldest are dropped


class RecentPrefixes:
    """Times are seconds of a monotonic clock."""

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
        """Entries, repeated ones included."""
        return len(self._order)

    def note(self, worker: str, hashes: Sequence[bytes], now: float) -> None:
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
        """within: seconds, at most and by default those of the index."""
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
        """Leading blocks that were sent to the worker at `since` or later."""
        sent = self._sent
        for num_before, block in enumerate(hashes):
            workers = sent.get(block)
            if workers is None or workers.get(worker, -inf) < since:
                return num_before
        return len(hashes)

    def drop(self, worker: str, now: float) -> None:
        """The worker's cache is gone."""
        self._dropped[worker] = now
        for key in [key for key, when in self._dropped.items() if now - when > self.seconds]:
            del self._dropped[key]

    def _forget(self, when: float, block: bytes, worker: str) -> None:
        """Keep a block that was sent to the same worker again since."""
        workers = self._sent.get(block, {})
        if workers.get(worker) == when:
            del workers[worker]
            if not workers:
                del self._sent[block]
