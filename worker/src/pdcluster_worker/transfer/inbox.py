"""The receiving side's epochs: what may be written where, and when a fence holds.

Both transports ask here before a byte goes into a block, so they share one set
of rules: an epoch writes only into the blocks that `open` named, each once and
in that order, and never after `Fenced`.  A writer holds the epoch (`enter` ..
`leave`) only while bytes are being copied, never while it waits for a peer;
therefore a fence never waits for a peer either.  Knows nothing of sockets.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import Fenced, KVMemory
from pdcluster_worker.messages.requests import EPOCH_BYTES
from pdcluster_worker.transfer.layout import CHECKSUM_START, block_crc, extend_checksum


@dataclass(slots=True, eq=False)
class IncomingEpoch:
    """One open epoch.

    num_claimed:  blocks of `block_ids` that frames have been accepted for, from the front.
    crcs:         CRC by block received whole (0 when verification is off).
    num_copying:  writers that are copying into a block right now.
    """

    epoch: bytes
    block_ids: tuple[int, ...]
    num_claimed: int = 0
    crcs: dict[int, int] = field(default_factory=dict)
    num_copying: int = 0
    is_fenced: bool = False


class Inbox:
    """All open epochs of one engine; safe from any thread, never waits."""

    def __init__(self, memory: KVMemory, verify: bool, emit: Callable[[Fenced], None]) -> None:
        self._memory = memory
        self._verify = verify
        self._emit = emit
        self._lock = threading.Lock()
        self._epochs: dict[bytes, IncomingEpoch] = {}
        self._open_blocks: set[int] = set()

    def open(self, epoch: bytes, block_ids: Sequence[int]) -> None:
        """Accept writes of this epoch into these blocks, in this order.

        Raises ValueError when the epoch is malformed or open already, or a block is out of range, repeated or open under another epoch.
        """
        blocks = set(block_ids)
        if len(epoch) != EPOCH_BYTES:
            raise ValueError(f"epoch has {len(epoch)} bytes, not {EPOCH_BYTES}")
        if len(blocks) != len(block_ids) or not all(0 <= block < self._memory.num_blocks for block in blocks):
            raise ValueError(f"block ids must be distinct and in 0..{self._memory.num_blocks - 1}: {list(block_ids)}")
        with self._lock:
            if epoch in self._epochs:
                raise ValueError("epoch is open already: every transfer needs its own")
            if taken := blocks & self._open_blocks:
                raise ValueError(f"blocks {sorted(taken)} are open under another epoch: fence it first")
            self._epochs[epoch] = IncomingEpoch(epoch, tuple(block_ids))
            self._open_blocks |= blocks

    def fence(self, epoch: bytes) -> None:
        """Accept nothing more of this epoch; `Fenced` is emitted here, or by the last `leave` if a copy is under way."""
        with self._lock:
            receiving = self._epochs.get(epoch)
            if receiving is None:
                self._emit(Fenced(epoch, frozenset(), 0))
            elif not receiving.is_fenced:
                receiving.is_fenced = True
                self._finish(receiving)

    def claim(self, epoch: bytes, block_ids: Sequence[int]) -> IncomingEpoch | str:
        """Ask to write the next blocks of an epoch; each block can be claimed once.  Returns why not as a str."""
        with self._lock:
            receiving = self._epochs.get(epoch)
            if receiving is None or receiving.is_fenced:
                return "dead epoch"
            start = receiving.num_claimed
            if receiving.block_ids[start : start + len(block_ids)] != tuple(block_ids):
                return _why_not(receiving, block_ids)
            receiving.num_claimed += len(block_ids)
            return receiving

    def enter(self, receiving: IncomingEpoch) -> bool:
        """Before copying bytes: True if allowed, and then `leave` must follow at once; False once the epoch is fenced."""
        with self._lock:
            if receiving.is_fenced:
                return False
            receiving.num_copying += 1
            return True

    def leave(self, receiving: IncomingEpoch) -> None:
        """After copying bytes."""
        with self._lock:
            receiving.num_copying -= 1
            if receiving.is_fenced:
                self._finish(receiving)

    def complete(self, receiving: IncomingEpoch, block_id: int, landing: memoryview) -> bool:
        """Land this block, whose bytes have all arrived; False once the epoch is fenced (the block then counts as missing)."""
        if not self.enter(receiving):
            return False
        try:
            self._memory.land(block_id, landing)
        finally:
            self.leave(receiving)
        crc = block_crc(self._memory.block(block_id)) if self._verify else 0
        with self._lock:
            if not receiving.is_fenced:
                receiving.crcs[block_id] = crc
            return not receiving.is_fenced

    def _finish(self, receiving: IncomingEpoch) -> None:
        if receiving.num_copying:
            return
        del self._epochs[receiving.epoch]
        self._open_blocks.difference_update(receiving.block_ids)
        received = frozenset(receiving.crcs)
        self._emit(Fenced(receiving.epoch, received, len(received) * self._memory.block_bytes, self._checksum(receiving)))

    def _checksum(self, receiving: IncomingEpoch) -> int | None:
        if not self._verify or len(receiving.crcs) < len(receiving.block_ids):
            return None
        return extend_checksum(CHECKSUM_START, (receiving.crcs[block] for block in receiving.block_ids))


def _why_not(receiving: IncomingEpoch, block_ids: Sequence[int]) -> str:
    """Name the first block that is not the next one of the opened list."""
    expected = receiving.block_ids[receiving.num_claimed :]
    index = next(i for i, block in enumerate(block_ids) if i >= len(expected) or expected[i] != block)
    block = block_ids[index]
    if block not in receiving.block_ids:
        return f"block {block} is not open under this epoch"
    if block in receiving.block_ids[: receiving.num_claimed + index]:
        return f"block {block} was already written"
    return f"block {block} is out of order"
