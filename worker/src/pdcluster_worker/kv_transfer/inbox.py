"""The receiving side of one port: what may be written where, and when a fence holds."""

# Both transports ask here before a byte goes into a block, so they share one set of rules: an epoch
# writes only into the blocks that `open` named, each head of them once and in that order, and never
# after `Fenced`. Slices of an epoch come from one rank of the peer each, in any mix; a block has
# arrived when all heads of this port have. A writer holds the epoch (`enter` .. `leave`) only while
# bytes are being copied, never while it waits for a peer; therefore a fence never waits for a peer
# either. Knows nothing of sockets.

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import Fenced, KVMemory
from pdcluster_worker.kv_transfer.sharded import ShardChecksum, combined, head_crcs
from pdcluster_worker.messages.requests import EPOCH_BYTES

DEAD_EPOCH = "dead epoch"


@dataclass(slots=True, eq=False)
class IncomingEpoch:
    """One open epoch."""

    epoch: bytes
    block_ids: tuple[int, ...]
    # What of it comes from each rank of the peer, by its heads.
    arriving: "dict[range, IncomingShard]" = field(default_factory=dict)
    num_copying: int = 0  # writers that are copying into a block right now
    is_fenced: bool = False
    verify: bool = False  # its blocks are summed up


@dataclass(slots=True, eq=False)
class IncomingShard:
    """Some heads of an epoch's blocks."""

    receiving: IncomingEpoch
    heads: range
    num_claimed: int = 0  # blocks of `block_ids` that frames have been accepted for, from the front
    # CRCs of the heads by block received whole (none when verification is off).
    crcs: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Inbox:
    """All open epochs of one port; safe from any thread, never waits."""

    def __init__(self, memory: KVMemory, verify: bool, emit: Callable[[Fenced], None]) -> None:
        self._memory = memory
        self._verify = verify
        self._emit = emit
        self._lock = threading.Lock()
        self._epochs: dict[bytes, IncomingEpoch] = {}
        self._open_blocks: set[int] = set()

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Accept writes of this epoch into these blocks, in this order.  Raises ValueError."""
        blocks = set(block_ids)
        if len(epoch) != EPOCH_BYTES:
            raise ValueError(f"epoch has {len(epoch)} bytes, not {EPOCH_BYTES}")
        if len(blocks) != len(block_ids) or not all(
            0 <= block < self._memory.num_blocks for block in blocks
        ):
            raise ValueError(
                f"block ids must be distinct and in 0..{self._memory.num_blocks - 1}: "
                f"{list(block_ids)}"
            )
        with self._lock:
            if epoch in self._epochs:
                raise ValueError("epoch is open already: every transfer needs its own")
            if taken := blocks & self._open_blocks:
                raise ValueError(
                    f"blocks {sorted(taken)} are open under another epoch: fence it first"
                )
            self._epochs[epoch] = IncomingEpoch(
                epoch, tuple(block_ids), verify=verify or self._verify
            )
            self._open_blocks |= blocks

    def fence(self, epoch: bytes) -> None:
        """Accept nothing more; `Fenced` comes here, or by the last `leave`."""
        with self._lock:
            receiving = self._epochs.get(epoch)
            if receiving is None:
                self._emit(Fenced(epoch, frozenset(), 0))
            elif not receiving.is_fenced:
                receiving.is_fenced = True
                self._finish(receiving)

    def is_open(self, epoch: bytes) -> bool:
        with self._lock:
            receiving = self._epochs.get(epoch)
            return receiving is not None and not receiving.is_fenced

    def claim(self, epoch: bytes, heads: range, block_ids: Sequence[int]) -> IncomingShard | str:
        """Ask to write these heads of the next blocks, once; returns why not as a str."""
        with self._lock:
            receiving = self._epochs.get(epoch)
            if receiving is None or receiving.is_fenced:
                return DEAD_EPOCH
            arriving = receiving.arriving.get(heads) or self._new_slice(receiving, heads)
            if isinstance(arriving, str):
                return arriving
            start = arriving.num_claimed
            if receiving.block_ids[start : start + len(block_ids)] != tuple(block_ids):
                return _why_not(arriving, block_ids)
            receiving.arriving[heads] = arriving
            arriving.num_claimed += len(block_ids)
            return arriving

    def enter(self, arriving: IncomingShard) -> bool:
        """Before copying bytes: if True, `leave` must follow; False once fenced."""
        with self._lock:
            if arriving.receiving.is_fenced:
                return False
            arriving.receiving.num_copying += 1
            return True

    def leave(self, arriving: IncomingShard) -> None:
        """After copying bytes."""
        receiving = arriving.receiving
        with self._lock:
            receiving.num_copying -= 1
            if receiving.is_fenced:
                self._finish(receiving)

    def complete(
        self, arriving: IncomingShard, block_id: int, write_block: Callable[[], None]
    ) -> bool:
        """Copy this shard of a block, which is there whole; False once the epoch is fenced."""
        if not self.enter(arriving):
            return False
        heads = arriving.heads
        try:
            write_block()
        finally:
            self.leave(arriving)
        crcs: tuple[int, ...] = ()
        if arriving.receiving.verify:
            crcs = head_crcs(self._memory.block(block_id, heads), len(heads))
        with self._lock:
            if not arriving.receiving.is_fenced:
                arriving.crcs[block_id] = crcs
            return not arriving.receiving.is_fenced

    def _new_slice(self, receiving: IncomingEpoch, heads: range) -> IncomingShard | str:
        held = self._memory.heads
        if not held.start <= heads.start < heads.stop <= held.stop:
            return f"heads {_in_words(heads)} are not held here: {_in_words(held)} are"
        for other in receiving.arriving:
            if heads.start < other.stop and other.start < heads.stop:
                return f"heads {_in_words(heads)} come as {_in_words(other)} in this transfer"
        return IncomingShard(receiving, heads)

    def _finish(self, receiving: IncomingEpoch) -> None:
        if receiving.num_copying:
            return
        del self._epochs[receiving.epoch]
        self._open_blocks.difference_update(receiving.block_ids)
        slices = list(receiving.arriving.values())
        received: frozenset[int] = frozenset()
        if sum(len(one.heads) for one in slices) == len(self._memory.heads):
            received = frozenset.intersection(*(frozenset(one.crcs) for one in slices))
        num_bytes = sum(len(one.crcs) * len(one.heads) for one in slices) * self._memory.head_bytes
        is_whole = receiving.verify and len(received) == len(receiving.block_ids)
        checksum = combined(map(_checksum_of, slices)) if is_whole else None
        self._emit(Fenced(receiving.epoch, received, num_bytes, checksum))


def _checksum_of(arriving: IncomingShard) -> int:
    checksum = ShardChecksum(arriving.heads)
    checksum.extend(arriving.crcs[block_id] for block_id in arriving.receiving.block_ids)
    return checksum.value


def _in_words(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"


def _why_not(arriving: IncomingShard, block_ids: Sequence[int]) -> str:
    """Name the first block that is not the next one of the opened list."""
    receiving, num_claimed = arriving.receiving, arriving.num_claimed
    expected = receiving.block_ids[num_claimed:]
    index = next(
        i for i, block in enumerate(block_ids) if i >= len(expected) or expected[i] != block
    )
    block = block_ids[index]
    if block not in receiving.block_ids:
        return f"block {block} is not open under this epoch"
    if block in receiving.block_ids[: num_claimed + index]:
        return f"block {block} was already written"
    return f"block {block} is out of order"
