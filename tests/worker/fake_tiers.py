"""Tiers of a FakeRunner's blocks, copied when a test says so."""

from collections.abc import Callable, Sequence

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopied,
    BlockCopy,
    BlockLookup,
    BlockPlace,
    BlocksFound,
    CopyOutcome,
    TierAnswer,
    TierFacts,
)
from tests.worker.fake_runner import FakeRunner

KNOWN = 1000
"""Slots of a shared tier: blocks that an engine knows of."""


class FakeTiers:
    """A KVTierIO.  sizes: slots of each tier.  queued: copies that have not begun.

    store: blocks of a shared tier below them, by key, which others may change; None = there is
    none.  next_outcome: of the next copy that it can have.  seconds: of each copy.  refuses: why
    the store answers no lookup; empty = it does.
    """

    def __init__(
        self, runner: FakeRunner, sizes: Sequence[int], store: dict[bytes, bytes] | None = None
    ) -> None:
        self.tiers = [TierFacts(f"tier{number}", size) for number, size in enumerate(sizes)]
        self.store = store
        self.lookups: list[BlockLookup] = []
        self.refuses = ""
        self.full: set[int] = set()  # tiers that take no block
        if store is not None:
            self.tiers.append(TierFacts("shared", KNOWN, store="store"))
        self.block_bytes = runner.block_bytes
        self.queued: list[BlockCopy] = []
        self.next_outcome: CopyOutcome = "copied"
        self.seconds = 0.001
        self.on_read: Callable[[int], None] = lambda block_id: None
        self.on_write: Callable[[int], None] = lambda block_id: None
        self.slots: dict[BlockPlace, tuple[bytes, bytes]] = {}
        self.num_cancelled = 0
        self._runner = runner
        self._cancelled: set[int] = set()
        self._answers: list[TierAnswer] = []

    def start(self, copies: Sequence[BlockCopy]) -> None:
        self.queued += copies

    def cancel(self, copy_ids: Sequence[int]) -> None:
        self._cancelled.update(copy_ids)

    def look_up(self, lookup: BlockLookup) -> None:
        self.lookups.append(lookup)

    def poll(self) -> list[TierAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        pass

    def copy(self, count: int = 1000, *, last: bool = False) -> None:
        """Answer all lookups, and do some copies, the first ones queued or the last ones."""
        for lookup in self.lookups:
            self._answers.append(self._look_up(lookup))
        self.lookups.clear()
        for _ in range(min(count, len(self.queued))):
            copy = self.queued.pop(-1 if last else 0)
            answer = BlockCopied(copy.copy_id, self._copy(copy), self.seconds, "no space")
            self._answers.append(answer)

    def check(self, core: EngineCore) -> None:
        """Assert that each slot that the core counts as stored holds that block."""
        for number, tier in enumerate(core._tiers.tiers):
            if tier.is_shared:
                continue  # others may have deleted it
            for key, slot in tier.slots._stored.items():
                assert self.slots[BlockPlace(number, slot)][0] == key

    def _copy(self, copy: BlockCopy) -> CopyOutcome:
        if copy.copy_id in self._cancelled:
            self.num_cancelled += 1
            return "cancelled"
        is_save, is_load = copy.source.tier == POOL, copy.target.tier == POOL
        if is_save:
            self.on_read(copy.source.slot)
        if is_load:
            self.on_write(copy.target.slot)
        if copy.target.tier in self.full:
            return "failed"
        outcome = self.next_outcome
        if (outcome == "damaged" and not is_save) or (outcome == "failed" and not is_load):
            self.next_outcome = "copied"
            self._put(copy, b"\xff" * self.block_bytes)
            return outcome
        if is_save:
            self._put(copy, bytes(self._runner.block(copy.source.slot)))
            return "copied"
        if self._is_shared(copy.source):
            assert self.store is not None
            if copy.key not in self.store:
                return "absent"
            self._put(copy, self.store[copy.key])
            return "copied"
        key, data = self.slots[copy.source]
        assert key == copy.key, "another block is in the slot that is read"
        self._put(copy, data)
        return "copied"

    def _put(self, copy: BlockCopy, data: bytes) -> None:
        if copy.target.tier == POOL:
            self._runner.block(copy.target.slot)[:] = data
        elif self._is_shared(copy.target):
            assert self.store is not None
            if data != b"\xff" * self.block_bytes:  # a store has whole blocks alone
                self.store[copy.key] = data
        else:
            self.slots[copy.target] = (copy.key, data)

    def _is_shared(self, place: BlockPlace) -> bool:
        return self.store is not None and place.tier == len(self.tiers) - 1

    def _look_up(self, lookup: BlockLookup) -> BlocksFound:
        store = self.store
        assert store is not None
        if self.refuses:
            return BlocksFound(lookup.lookup_id, 0, self.seconds, self.refuses)
        absent = (n for n, key in enumerate(lookup.keys) if key not in store)
        return BlocksFound(lookup.lookup_id, next(absent, len(lookup.keys)), self.seconds)
