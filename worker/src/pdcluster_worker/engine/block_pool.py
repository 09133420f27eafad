"""Ownership of every KV block: the five states of docs/kv-blocks.md.

    free --allocate--> in use --release--> free, or cached when it has a hash
    cached --allocate (its hash is dropped) or acquire (a prefix hit)--> in use
    in use --start_receiving--> receiving --finish_receiving--> in use
                                receiving --quarantine--> quarantined --release_quarantined--> free

Guarantees that a block is in exactly one state, that every step not drawn here is an
AssertionError (a double free too), and that each operation is O(1) a block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import islice

from pdcluster_worker.messages.engine import BlockEvents

MOST_HASHES = 100_000
"""Hashes of one report, 3.4 MB: a tier may hold millions, and a message has a limit."""


class BlockState(IntEnum):
    FREE = 0
    CACHED = 1
    IN_USE = 2
    RECEIVING = 3
    QUARANTINED = 4


class PrefixCache:
    """Hashes of full, computed blocks, one to one: a second block of the same content gets none."""

    def __init__(self) -> None:
        self._block_ids: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._is_cleared = False
        self._num_events = 0
        # Whether tiers below hold a block, and all that they do.  None: there are no tiers.
        self._is_below: Callable[[bytes], bool] | None = None
        self._below: Callable[[], Iterable[bytes]] = list
        self._unsaved: dict[int, None] = {}  # blocks that are new to them, in order

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hashes

    def attach_below(
        self, is_below: Callable[[bytes], bool], below: Callable[[], Iterable[bytes]]
    ) -> None:
        """Count blocks that tiers below hold as found here, and note those that are new to them."""
        self._is_below, self._below = is_below, below
        self._stored = dict.fromkeys(below())

    def left_below(self, block_hash: bytes) -> None:
        """A tier below has dropped it."""
        if block_hash not in self._block_ids and not self._is_held_below(block_hash):
            _note(block_hash, self._removed, self._stored)

    def came_below(self, block_hash: bytes) -> None:
        """A tier below has it by another worker's write, and none had it before."""
        if block_hash not in self._block_ids:
            _note(block_hash, self._stored, self._removed)

    def unsaved(self, limit: int) -> list[tuple[int, bytes]]:
        """The first blocks that are new to the tiers below."""
        return [(block_id, self._hashes[block_id]) for block_id in islice(self._unsaved, limit)]

    def saved(self, block_id: int) -> None:
        self._unsaved.pop(block_id, None)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_ids.get(block_hash)

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
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
        """First index and blocks of the longest prefix whose last `num_last` hashes are known."""
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
        """Make a block findable; the first block with this content wins."""
        assert block_id not in self._hashes, f"block {block_id} is hashed twice"
        if block_hash in self._block_ids:
            return
        self._block_ids[block_hash] = block_id
        self._hashes[block_id] = block_hash
        if self._is_below is not None:
            self._unsaved[block_id] = None
        if not self._is_held_below(block_hash):
            _note(block_hash, self._stored, self._removed)

    def drop(self, block_id: int) -> None:
        block_hash = self._hashes.pop(block_id)
        del self._block_ids[block_hash]
        self._unsaved.pop(block_id, None)
        if not self._is_held_below(block_hash):
            _note(block_hash, self._removed, self._stored)

    def _is_held_below(self, block_hash: bytes) -> bool:
        return self._is_below is not None and self._is_below(block_hash)

    def begin_snapshot(self) -> None:
        self._is_cleared = True
        self._stored = dict.fromkeys([*self._block_ids, *self._below()])
        self._removed = {}

    @property
    def has_events(self) -> bool:
        return bool(self._stored or self._removed or self._is_cleared)

    def take_events(self) -> BlockEvents | None:
        """Net changes since the last call, in order, under the next number, as many as fit into a
        message; None without any.
        """
        if not self.has_events:
            return None
        self._num_events += 1
        stored = list(islice(self._stored, MOST_HASHES))
        removed = list(islice(self._removed, MOST_HASHES - len(stored)))
        events = BlockEvents(stored, removed, self._num_events, self._is_cleared)
        for block_hash in stored:
            del self._stored[block_hash]
        for block_hash in removed:
            del self._removed[block_hash]
        self._is_cleared = False
        return events

    def check(self) -> None:
        self.check_totals()
        for block_id in self._hashes:
            self.check_block(block_id)

    def check_totals(self) -> None:
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


class BlockPool:
    """Reuse order: blocks without a hash, then cached ones, the least recently released first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_moves = 0  # times that a block was taken, shared, hashed or let go
        self.num_shares = 0  # holders beyond the first of a block, over all blocks
        self.num_evictions = 0  # cached blocks that were taken for other tokens
        self.num_loading = 0  # receiving blocks that are read from a tier below
        self.prefix_cache = PrefixCache()
        self._states = bytearray(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._counts = [num_blocks, 0, 0, 0, 0]
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def state(self, block_id: int) -> BlockState:
        return BlockState(self._states[block_id])

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def counts(self) -> dict[str, int]:
        return {state.name.lower(): self._counts[state] for state in BlockState}

    def allocate(self, count: int) -> list[int]:
        """Take `count` private blocks; the caller has checked `num_available`."""
        assert count <= self.num_available, (
            f"{count} blocks asked of {self.num_available} available"
        )
        return [self._pop() for _ in range(count)]

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each: a prefix hit, or a send that reads the block."""
        for block_id in block_ids:
            if self._states[block_id] == BlockState.CACHED:
                del self._cached[block_id]
                self._move(block_id, BlockState.CACHED, BlockState.IN_USE)
            assert self._states[block_id] == BlockState.IN_USE, (
                f"block {block_id} acquired while {self.state(block_id).name}"
            )
            self.num_shares += self._ref_counts[block_id] > 0
            self._ref_counts[block_id] += 1
            self.num_moves += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one holder of each, last first."""
        for block_id in reversed(block_ids):
            assert self._states[block_id] == BlockState.IN_USE, (
                f"block {block_id} released while {self.state(block_id).name}"
            )
            self._ref_counts[block_id] -= 1
            self.num_moves += 1
            if self._ref_counts[block_id] > 0:
                self.num_shares -= 1
                continue
            if block_id in self.prefix_cache:
                self._move(block_id, BlockState.IN_USE, BlockState.CACHED)
                self._cached[block_id] = None
            else:
                self._move(block_id, BlockState.IN_USE, BlockState.FREE)
                self._free.append(block_id)

    def cache(self, block_id: int, block_hash: bytes) -> None:
        assert self._states[block_id] == BlockState.IN_USE, (
            f"block {block_id} hashed while {self.state(block_id).name}"
        )
        self.num_moves += 1
        self.prefix_cache.insert(block_id, block_hash)

    def start_receiving(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            assert self._ref_counts[block_id] == 1, (
                f"block {block_id} is a transfer target with {self._ref_counts[block_id]} holders"
            )
            assert block_id not in self.prefix_cache, (
                f"block {block_id} is a transfer target with a hash"
            )
            self._move(block_id, BlockState.IN_USE, BlockState.RECEIVING)

    def finish_receiving(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._move(block_id, BlockState.RECEIVING, BlockState.IN_USE)

    def quarantine(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._move(block_id, BlockState.RECEIVING, BlockState.QUARANTINED)
            self._ref_counts[block_id] -= 1

    def release_quarantined(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._move(block_id, BlockState.QUARANTINED, BlockState.FREE)
            self._free.append(block_id)

    def check(self) -> None:
        """Assert that the states sum to the total and every structure agrees; O(num_blocks)."""
        self.check_totals()
        for block_id in range(self.num_blocks):
            self._check_block(block_id, self.state(block_id))
        self.check_counts(self.count_states(range(self.num_blocks)))
        self.check_free(range(len(self._free)), bytearray(self.num_blocks))

    def count_states(self, block_ids: range) -> list[int]:
        states = self._states[block_ids.start : block_ids.stop]
        return [states.count(state) for state in BlockState]

    def check_counts(self, found: Sequence[int]) -> None:
        for state in BlockState:
            assert found[state] == self._counts[state], f"{state.name} is counted wrong"

    def check_totals(self) -> None:
        """The part of `check` that looks at no block; O(1)."""
        self.prefix_cache.check_totals()
        assert sum(self._counts) == self.num_blocks, (
            f"states {self.counts()} do not sum to {self.num_blocks}"
        )
        assert len(self._free) == self._counts[BlockState.FREE], "the free stack has strays"
        assert len(self._cached) == self._counts[BlockState.CACHED], "the cached queue has strays"

    def check_blocks(self, block_ids: range, held: Mapping[int, int]) -> None:
        """Assert that every structure agrees on these, with `held` references, 0 by default."""
        for block_id in block_ids:
            self._check_block(block_id, self.state(block_id))
            found, expected = self._ref_counts[block_id], held.get(block_id, 0)
            assert found == expected, (
                f"block {block_id} has {found} references, {expected} holders are known"
            )

    def check_free(self, positions: range, seen: bytearray) -> None:
        """Assert that this part of the free stack is free.  seen: [num_blocks], parts before."""
        for block_id in self._free[positions.start : positions.stop]:
            assert self._states[block_id] == BlockState.FREE, (
                "a block on the free stack is not free"
            )
            assert not seen[block_id], "the free stack has doubles"
            seen[block_id] = 1

    def _check_block(self, block_id: int, state: BlockState) -> None:
        ref_count, hashed = self._ref_counts[block_id], self.prefix_cache.check_block(block_id)
        assert (block_id in self._cached) == (state is BlockState.CACHED), (
            f"block {block_id} is {state.name} in the wrong queue"
        )
        if state is BlockState.IN_USE:
            assert ref_count > 0, f"block {block_id} has no reference"
            return
        assert ref_count == (state is BlockState.RECEIVING), (
            f"block {block_id} is {state.name} with {ref_count} holders"
        )
        assert hashed == (state is BlockState.CACHED), (
            f"block {block_id} is {state.name}, hashed={hashed}"
        )

    def _pop(self) -> int:
        if self._free:
            block_id = self._free.pop()
            self._move(block_id, BlockState.FREE, BlockState.IN_USE)
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._move(block_id, BlockState.CACHED, BlockState.IN_USE)
            self.prefix_cache.drop(block_id)
            self.num_evictions += 1
        self._ref_counts[block_id] = 1
        return block_id

    def _move(self, block_id: int, old: BlockState, new: BlockState) -> None:
        assert self._states[block_id] == old, (
            f"block {block_id} is {self.state(block_id).name}, not {old.name}"
        )
        self._states[block_id] = new
        self._counts[old] -= 1
        self._counts[new] += 1
        self.num_moves += 1
