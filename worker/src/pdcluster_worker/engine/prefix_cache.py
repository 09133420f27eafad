"""Map of block hashes to blocks, and its changes since they were last read.

Guarantees a one-to-one map: a second block with the same content stays
unhashed, so a hash names one block and a block one hash.  The holders of a block,
and its reuse, are the business of `engine.block_pool`.
"""

from collections.abc import Sequence

from pdcluster_worker.messages.engine import BlockEvents


class PrefixCache:
    """Hashes of full, computed blocks of this engine."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._is_cleared = False
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hashes

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest known prefix of `hashes`, at most `limit` of them, in order."""
        block_ids: list[int] = []
        for block_hash in hashes[:limit]:
            block_id = self._block_ids.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def match_last(
        self, hashes: Sequence[bytes], limit: int, num_last: int
    ) -> tuple[int, list[int]]:
        """The end of the longest prefix of at most `limit` hashes whose last `num_last` are known.

        Returns the index of the first of them, and the blocks; all from 0 on where there are fewer.
        """
        block_ids: list[int] = []  # in reverse
        for index in reversed(range(min(limit, len(hashes)))):
            if len(block_ids) == num_last:
                return index + 1, block_ids[::-1]
            block_id = self._block_ids.get(hashes[index])
            if block_id is None:
                block_ids = []
            else:
                block_ids.append(block_id)
        return 0, block_ids[::-1]

    def insert(self, block_id: int, block_hash: bytes) -> None:
        """Make a block findable; the first block with this content wins, a later one stays
        unhashed.
        """
        assert block_id not in self._hashes, f"block {block_id} is hashed twice"
        if block_hash in self._block_ids:
            return
        self._block_ids[block_hash] = block_id
        self._hashes[block_id] = block_hash
        _note(block_hash, self._stored, self._removed)

    def drop(self, block_id: int) -> None:
        """Forget the hash of a block that is about to be overwritten."""
        block_hash = self._hashes.pop(block_id)
        del self._block_ids[block_hash]
        _note(block_hash, self._removed, self._stored)

    def begin_snapshot(self) -> None:
        """Make the next events a snapshot, for a reader that has missed some."""
        self._is_cleared = True
        self._stored = dict.fromkeys(self._block_ids)
        self._removed = {}

    def take_events(self) -> BlockEvents | None:
        """Net changes since the last call, in order, under the next number; None without any."""
        if not self._stored and not self._removed and not self._is_cleared:
            return None
        self._num_events += 1
        stored, removed = list(self._stored), list(self._removed)
        events = BlockEvents(stored, removed, self._num_events, self._is_cleared)
        self._stored, self._removed, self._is_cleared = {}, {}, False
        return events

    def check(self) -> None:
        """Assert that the two maps are each other's inverse."""
        self.check_totals()
        for block_id in self._hashes:
            self.check_block(block_id)

    def check_totals(self) -> None:
        """The part of `check` that looks at no block."""
        assert len(self._hashes) == len(self._block_ids), "prefix cache maps differ in length"

    def check_block(self, block_id: int) -> bool:
        """The part of `check` that is about one block; whether it has a hash."""
        block_hash = self._hashes.get(block_id)
        if block_hash is None:
            return False
        assert self._block_ids.get(block_hash) == block_id, (
            f"block {block_id} and its hash disagree"
        )
        return True


def _note(block_hash: bytes, changes: dict[bytes, None], opposite: dict[bytes, None]) -> None:
    # A hash stored and removed between two reports is no change: the lists stay free of order
    # between one another.
    if block_hash in opposite:
        del opposite[block_hash]
    else:
        changes[block_hash] = None
