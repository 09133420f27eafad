"""Tiers of a FakeRunner's blocks, copied when a test says so."""

from collections.abc import Callable, Sequence

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopied,
    BlockCopy,
    BlockPlace,
    CopyOutcome,
    TierFacts,
)
from tests.worker.fake_runner import FakeRunner


class FakeTiers:
    """A KVTierIO.  sizes: slots of each tier.  queued: copies that have not begun.

    next_outcome: of the next copy that it can have.  seconds: of each copy.
    """

    def __init__(self, runner: FakeRunner, sizes: Sequence[int]) -> None:
        self.tiers = [TierFacts(f"tier{number}", size) for number, size in enumerate(sizes)]
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
        self._answers: list[BlockCopied] = []

    def start(self, copies: Sequence[BlockCopy]) -> None:
        self.queued += copies

    def cancel(self, copy_ids: Sequence[int]) -> None:
        self._cancelled.update(copy_ids)

    def poll(self) -> list[BlockCopied]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        pass

    def copy(self, count: int = 1000, *, last: bool = False) -> None:
        """Do some copies, the first ones queued or the last ones."""
        for _ in range(min(count, len(self.queued))):
            copy = self.queued.pop(-1 if last else 0)
            answer = BlockCopied(copy.copy_id, self._copy(copy), self.seconds, "no space")
            self._answers.append(answer)

    def check(self, core: EngineCore) -> None:
        """Assert that each slot that the core counts as stored holds that block."""
        for number, tier in enumerate(core._tiers.tiers):
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
        outcome = self.next_outcome
        if (outcome == "damaged" and not is_save) or (outcome == "failed" and not is_load):
            self.next_outcome = "copied"
            self._put(copy, b"\xff" * self.block_bytes)
            return outcome
        if is_save:
            self._put(copy, bytes(self._runner.block(copy.source.slot)))
            return "copied"
        key, data = self.slots[copy.source]
        assert key == copy.key, "another block is in the slot that is read"
        self._put(copy, data)
        return "copied"

    def _put(self, copy: BlockCopy, data: bytes) -> None:
        if copy.target.tier == POOL:
            self._runner.block(copy.target.slot)[:] = data
        else:
            self.slots[copy.target] = (copy.key, data)
