"""Which KV blocks each worker has in its prefix cache, as its events tell [Y11].

Block hashes are chained, so only leading blocks count as a match.  The index
may lag behind a worker: it steers a choice and never promises a hit.  Sequence
numbers are not its business: after a gap the subscriber takes a new snapshot.
"""

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Block hashes by worker key."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[bytes]] = {}

    def snapshot(self, worker: str, hashes: Iterable[bytes]) -> None:
        """Replace all that is known of a worker."""
        self._blocks[worker] = set(hashes)

    def apply(self, worker: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Take one batch of events; duplicates are no-ops, and a worker without a snapshot starts from nothing.

        A hash in both lists ends as removed: a missed hit costs less than a false one.
        """
        blocks = self._blocks.setdefault(worker, set())
        blocks.update(stored)
        blocks.difference_update(removed)

    def drop(self, worker: str) -> None:
        """Forget a worker with all its blocks; unknown ones are a no-op.  The caller has ended its events before."""
        self._blocks.pop(worker, None)

    def hashes(self, worker: str) -> frozenset[bytes]:
        """All that is known of a worker: what a snapshot for others holds."""
        return frozenset(self._blocks.get(worker, ()))

    def match(self, worker: str, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of `hashes` the worker has; 0 for an unknown worker."""
        blocks = self._blocks.get(worker, set())
        for num_matched, block_hash in enumerate(hashes):
            if block_hash not in blocks:
                return num_matched
        return len(hashes)
