"""Tiers below the block pool: blocks are saved behind the steps, and loaded ahead of them.

A copy is one more owner in the pool's states (docs/kv-blocks.md): a block that is saved has a
holder more, as for a send; one that is loaded is receiving until its copy is answered, and
quarantined until then if its load is cancelled.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

import msgspec

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopied,
    BlockCopy,
    BlockPlace,
    KVTierIO,
    TierFacts,
)
from pdcluster_worker.engine.tier_rates import Rate
from pdcluster_worker.engine.tier_slots import TierSlots
from pdcluster_worker.messages.engine import TierStats

logger = logging.getLogger(__name__)

MOST_SAVES = 64
"""Blocks that are saved at a time: some milliseconds of copying."""

HELD_SHARE = 8
"""Cached blocks are held for saves while all saves are below one part in so many of the pool."""

AHEAD_SHARE, MOST_AHEAD = 16, 1024
"""One part in so many of a tier is copied to the next before it is full; at most so many slots, and
as many as may be saved at a time, but no more than half of it.
"""


STUCK_SECONDS = 5.0
"""Time without an answer after which nothing is read: a disk may not answer for hours."""


class Tier:
    def __init__(self, facts: TierFacts) -> None:
        self.name = facts.name
        self.slots = TierSlots(facts.num_slots)
        self.load_rate = Rate()  # seconds of one block
        self.stats = TierStats(facts.name, facts.num_slots)
        for slot, key in facts.stored:
            self.slots.restore(slot, key)
        if facts.stored:
            self.slots.restored()

    @property
    def takes_blocks(self) -> bool:
        return not self.stats.reason

    def take_stats(self) -> TierStats:
        counts = self.slots.counts()
        self.stats.stored = counts["stored"] + counts["removed"]
        return msgspec.structs.replace(self.stats)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are read into the pool for one request, and for others that need them too."""

    keys: list[bytes]
    hits: list[int]  # blocks of the same prefix in the pool, held meanwhile
    blocks: dict[int, bytes]  # block -> what is read into it, in order
    started: float
    num_left: int  # copies without an answer
    arrived: set[int] = field(default_factory=set)
    cancelled: bool = False
    seconds: float = 0.0  # from its start to its end
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Blocks that follow a prefix hit: `keys` are read from `tiers`, `hits` are in the pool."""

    keys: list[bytes]
    tiers: list[int]  # of each of the keys
    hits: list[int]
    load: Load | None = None  # that reads the next block already


class KVTiers:
    """Every method is called from the engine's thread."""

    def __init__(self, pool: BlockPool, io: KVTierIO, clock: Callable[[], float]) -> None:
        self.tiers = [Tier(facts) for facts in io.tiers]
        self._pool = pool
        self._cache = pool.prefix_cache
        self._io = io
        self._clock = clock
        self._ids = count()
        self._saves: dict[int, BlockCopy] = {}  # from the pool
        self._moves: dict[int, BlockCopy] = {}  # from one tier to the next
        self._reads: dict[int, tuple[BlockCopy, Load]] = {}
        self._loading: dict[bytes, Load] = {}
        self._answered = 0.0  # by the clock: the last block that was read, or the first begun
        if self.tiers:
            self._cache.attach_below(self.holds, lambda: chain.from_iterable(self._slots()))

    def holds(self, key: bytes) -> bool:
        return any(key in slots for slots in self._slots())

    @property
    def num_reading(self) -> int:
        return len(self._reads)

    @property
    def stuck_seconds(self) -> float | None:
        """In how many seconds reads count as stuck unless one is answered, 0 = they do; None = no
        block is being read.
        """
        if not self._reads:
            return None
        return max(0.0, self._answered + STUCK_SECONDS - self._clock())

    def held(self) -> Iterator[int]:
        """Blocks of the pool with a holder here, once for each."""
        saves = [copy.source.slot for copy in self._saves.values()]
        loads = {id(load): load for load in self._loading.values()}.values()
        return chain(saves, *((*load.hits, *load.blocks) for load in loads))

    def run(self, hashes: Sequence[bytes], start: int, limit: int) -> PrefixRun:
        """The longest prefix from `start` on that the tiers and the pool hold together."""
        keys: list[bytes] = []
        tiers: list[int] = []
        hits = self._cache.match(hashes, start)
        for key in hashes[start:limit]:
            if key in self._loading:
                return PrefixRun(keys, tiers, hits, self._loading[key])
            if (block_id := self._cache.find(key)) is not None:
                hits.append(block_id)
            elif (tier := self._find(key)) is not None:
                keys.append(key)
                tiers.append(tier)
            else:
                break
        return PrefixRun(keys, tiers, hits)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """These blocks are used: the first of them is the last to be evicted."""
        for key in reversed(hashes):
            self.tiers[0].slots.touch(key)

    # --- from the pool down -------------------------------------------------------------------

    def save(self, num_spare: int) -> None:
        """Begin to save new blocks.  num_spare: cached ones that may be kept from being taken."""
        copies: list[BlockCopy] = []
        if self.tiers[0].takes_blocks:
            copies += self._save_blocks(num_spare)
        for number in range(len(self.tiers) - 1):
            if self.tiers[number + 1].takes_blocks:
                copies += self._move_oldest(number)
        if copies:
            self._io.start(copies)

    def _save_blocks(self, num_spare: int) -> Iterator[BlockCopy]:
        num_spare = min(num_spare, self._pool.num_blocks // HELD_SHARE - len(self._saves))
        for block_id, key in self._cache.unsaved(MOST_SAVES - len(self._saves)):
            if key in self.tiers[0].slots:
                self._cache.saved(block_id)
                continue
            if self._pool.state(block_id) is BlockState.CACHED:
                num_spare -= 1
                if num_spare < 0:
                    continue
            target = self._reserve(0, key)
            if target is None:
                return
            self._cache.saved(block_id)
            self._pool.acquire([block_id])
            copy = BlockCopy(next(self._ids), key, BlockPlace(POOL, block_id), target)
            self._saves[copy.copy_id] = copy
            yield copy

    def _move_oldest(self, number: int) -> Iterator[BlockCopy]:
        slots, below = self.tiers[number].slots, self.tiers[number + 1].slots
        most = min(MOST_AHEAD, -(-slots.num_slots // 2))
        num_ahead = min(most, max(MOST_SAVES, slots.num_slots // AHEAD_SHARE))
        moving = {copy.key for copy in self._moves.values()}
        num_more = min(num_ahead - slots.num_free, MOST_SAVES - len(moving))
        if num_more <= 0:
            return
        for key in slots.oldest(num_ahead):
            if key in below or key in moving:
                continue
            target = self._reserve(number + 1, key)
            if target is None:
                return
            source = BlockPlace(number, slots.acquire(key, is_use=False))
            copy = BlockCopy(next(self._ids), key, source, target)
            self._moves[copy.copy_id] = copy
            yield copy
            num_more -= 1
            if num_more == 0:
                return

    def _reserve(self, number: int, key: bytes) -> BlockPlace | None:
        tier = self.tiers[number]
        reserved = tier.slots.reserve(key)
        if reserved is None:
            return None
        if reserved.evicted is not None:
            tier.stats.evictions += 1
            self._cache.left_below(reserved.evicted)
        return BlockPlace(number, reserved.slot)

    # --- into the pool ------------------------------------------------------------------------

    def load(self, run: PrefixRun) -> Load:
        """Begin to read; the caller has checked that there is room for all keys and hits."""
        self._pool.acquire(run.hits)
        block_ids = self._pool.allocate(len(run.keys))
        self._pool.start_receiving(block_ids)
        self._pool.num_loading += len(block_ids)
        blocks = dict(zip(block_ids, run.keys, strict=True))
        load = Load(run.keys, run.hits, blocks, self._clock(), len(block_ids))
        if not self._reads:
            self._answered = load.started
        load.tiers = tuple(dict.fromkeys(self.tiers[number].name for number in run.tiers))
        copies: list[BlockCopy] = []
        for (block_id, key), number in zip(blocks.items(), run.tiers, strict=True):
            source = BlockPlace(number, self.tiers[number].slots.acquire(key))
            copy = BlockCopy(next(self._ids), key, source, BlockPlace(POOL, block_id))
            self._reads[copy.copy_id] = (copy, load)
            self._loading[key] = load
            copies.append(copy)
        self._io.start(copies)
        return load

    def cancel(self, load: Load) -> None:
        """No request waits for it any more: what has arrived is kept, the rest is fenced."""
        load.cancelled = True
        copies = [copy for copy, its_load in self._reads.values() if its_load is load]
        self._pool.num_loading -= len(copies)
        for copy in copies:
            self._pool.quarantine([copy.target.slot])
            del load.blocks[copy.target.slot]
        self._io.cancel([copy.copy_id for copy in copies])
        self._end(load)

    def poll(self) -> list[Load]:
        """Take what has been copied; returns the loads that have ended, cancelled ones left out."""
        ended = [self._take(answer) for answer in self._io.poll()]
        return [load for load in ended if load is not None]

    def _take(self, answer: BlockCopied) -> Load | None:
        if (copy := self._saves.pop(answer.copy_id, None)) is not None:
            self._pool.release([copy.source.slot])
            self._written(copy, answer)
        elif (copy := self._moves.pop(answer.copy_id, None)) is not None:
            self.tiers[copy.source.tier].slots.release(copy.source.slot)
            self._written(copy, answer)
        else:
            return self._was_read(*self._reads.pop(answer.copy_id), answer)
        return None

    def _written(self, copy: BlockCopy, answer: BlockCopied) -> None:
        tier = self.tiers[copy.target.tier]
        if answer.outcome == "copied":
            tier.slots.commit(copy.target.slot)
            tier.stats.saved_bytes += self._io.block_bytes
            return
        tier.slots.discard(copy.target.slot)
        if answer.outcome == "damaged":
            self._damaged(copy)
        elif answer.outcome == "failed" and tier.takes_blocks:
            tier.stats.reason = answer.reason
            logger.error("kv tier takes no more blocks tier=%s: %s", tier.name, answer.reason)

    def _was_read(self, copy: BlockCopy, load: Load, answer: BlockCopied) -> Load | None:
        tier, block_id = self.tiers[copy.source.tier], copy.target.slot
        tier.slots.release(copy.source.slot)
        self._answered = self._clock()
        if answer.outcome == "copied":
            tier.stats.loaded_bytes += self._io.block_bytes
            tier.load_rate.add(answer.seconds, self._clock())
        elif answer.outcome != "cancelled":
            self._damaged(copy)
        if load.cancelled:
            self._pool.release_quarantined([block_id])
            return None
        self._pool.finish_receiving([block_id])
        self._pool.num_loading -= 1
        if answer.outcome == "copied":
            load.arrived.add(block_id)
        load.num_left -= 1
        if load.num_left:
            return None
        self._end(load)
        return load

    def _end(self, load: Load) -> None:
        load.seconds = self._clock() - load.started
        for block_id, key in load.blocks.items():
            if block_id in load.arrived:
                self._pool.cache(block_id, key)
                if key in self.tiers[0].slots:
                    self._cache.saved(block_id)
        for key in load.keys:
            del self._loading[key]
        self._pool.release([*load.hits, *load.blocks])

    def _damaged(self, copy: BlockCopy) -> None:
        tier = self.tiers[copy.source.tier]
        tier.slots.remove(copy.key)
        tier.stats.damaged += 1
        self._cache.left_below(copy.key)
        logger.warning("damaged kv block tier=%s slot=%d", tier.name, copy.source.slot)

    # --- the whole ----------------------------------------------------------------------------

    def take_stats(self) -> list[TierStats]:
        return [tier.take_stats() for tier in self.tiers]

    def check(self) -> None:
        """Assert that each slot's state is that of its copies."""
        for number, tier in enumerate(self.tiers):
            tier.slots.check()
            writes = [*self._saves.values(), *self._moves.values()]
            num_writes = sum(copy.target.tier == number for copy in writes)
            assert tier.slots.counts()["writing"] == num_writes, "a slot is written by no copy"
        for copy, load in self._reads.values():
            state = BlockState.QUARANTINED if load.cancelled else BlockState.RECEIVING
            assert self._pool.state(copy.target.slot) is state, "a load has lost its block"

    def _slots(self) -> list[TierSlots]:
        return [tier.slots for tier in self.tiers]

    def _find(self, key: bytes) -> int | None:
        return next((n for n, slots in enumerate(self._slots()) if key in slots), None)
