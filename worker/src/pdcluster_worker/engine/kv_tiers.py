"""Tiers below the block pool: blocks are saved behind the steps, and loaded ahead of them.

A copy is one more owner in the pool's states (docs/kv-blocks.md): a block that is saved has a
holder more, as for a send; one that is loaded is receiving until its copy is answered, and
quarantined until then if its load is cancelled.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, count
from typing import Literal

from pdcluster_worker.engine.block_pool import BlockPool, BlockState
from pdcluster_worker.engine.tier import Load, PrefixRun, Tier
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopied,
    BlockCopy,
    BlockPlace,
    BlocksFound,
    KVTierIO,
)
from pdcluster_worker.engine.tier_slots import TierSlots
from pdcluster_worker.messages.engine import TierStats

logger = logging.getLogger(__name__)

MOST_SAVES = 64
"""Blocks that are saved at a time: some milliseconds of copying."""

HELD_SHARE = 8
"""Saves hold one part in so many of the pool at most: a disk may not answer for hours."""

MOST_SKIPPED = 64
"""Cached blocks that a look for others skips while none can be kept from being taken."""

AHEAD_SHARE, MOST_AHEAD = 16, 1024
"""One part in so many of a tier is copied to the next before it is full; at most so many slots, and
as many as may be saved at a time, but no more than half of it.
"""

MOST_UNSHARED = 4096
"""New blocks queued for a shared store; beyond that, the oldest are dropped."""


class KVTiers:
    """Every method is called from the engine's thread."""

    def __init__(self, pool: BlockPool, io: KVTierIO, clock: Callable[[], float]) -> None:
        self.tiers = [Tier(facts) for facts in io.tiers]
        self.found: list[BlocksFound] = []  # answers of a shared store to lookups
        self._own = [tier for tier in self.tiers if not tier.is_shared]
        self._pool = pool
        self._cache = pool.prefix_cache
        self.io = io
        self._clock = clock
        self._ids = count()
        self._saves: dict[int, BlockCopy] = {}  # from the pool
        self._moves: dict[int, BlockCopy] = {}  # from one tier to the next
        self._reads: dict[int, tuple[BlockCopy, Load]] = {}
        self._loading: dict[bytes, Load] = {}
        self._unshared: dict[bytes, None] = {}  # blocks that are new to a shared store, in order
        if self.tiers:
            self._cache.attach_below(self.holds, lambda: chain.from_iterable(self._slots()))

    def holds(self, key: bytes) -> bool:
        return any(key in slots for slots in self._slots())

    @property
    def shared(self) -> int | None:
        """Number of the tier that other workers share, the last one."""
        return len(self._own) if len(self.tiers) > len(self._own) else None

    @property
    def num_reading(self) -> int:
        return len(self._reads)

    @property
    def reasons(self) -> list[str]:
        return [tier.reason for tier in self.tiers]

    def overdue(self) -> list[Load]:
        """Loads whose requests are better computed now: their tier is stuck, or they take long."""
        now = self._clock()
        for tier in self.tiers:
            tier.check_writes(now)
        if not self._reads:
            return []
        stuck = {n for n, tier in enumerate(self.tiers) if tier.reads.stuck_seconds(now) == 0.0}
        for tier in (self.tiers[number] for number in stuck):
            if tier.silence.allows(now):
                tier.fail("it does not answer", now)
        return [
            load for load in self._loads() if load.due <= now or not stuck.isdisjoint(load.left)
        ]

    @property
    def overdue_seconds(self) -> float | None:
        """In how many seconds a load or a write is overdue; None = none is under way."""
        now, loads = self._clock(), self._loads()
        reading = {number for load in loads for number in load.left}
        stuck = [self.tiers[number].reads.stuck_seconds(now) for number in reading]
        stuck += [tier.writes.stuck_seconds(now) for tier in self.tiers]
        due = [load.due - now for load in loads]
        return min((max(0.0, each) for each in (*stuck, *due) if each is not None), default=None)

    def held(self) -> Iterator[int]:
        """Blocks of the pool with a holder here, once for each."""
        saves = [copy.source.slot for copy in self._saves.values()]
        return chain(saves, *((*load.hits, *load.blocks) for load in self._loads()))

    def run(self, hashes: Sequence[bytes], start: int, limit: int) -> PrefixRun:
        """The longest prefix from `start` on that the tiers and the pool hold together."""
        keys: list[bytes] = []
        tiers: list[int] = []
        hits, now = self._cache.match(hashes, start), self._clock()
        readable = [(n, tier.slots) for n, tier in enumerate(self.tiers) if tier.is_read(now)]
        for key in hashes[start:limit]:
            if key in self._loading:
                return PrefixRun(keys, tiers, hits, self._loading[key])
            if (block_id := self._cache.find(key)) is not None:
                hits.append(block_id)
            elif (found := next((n for n, slots in readable if key in slots), None)) is not None:
                keys.append(key)
                tiers.append(found)
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
        now = self._clock()
        most = min(MOST_SAVES, max(1, self._pool.num_blocks // HELD_SHARE))
        if (most := self.tiers[0].num_writes(now, most)) > len(self._saves):
            copies += self._save_blocks(num_spare, most - len(self._saves))
        for number, below in enumerate(self._own[1:]):
            copies += self._move_oldest(number, below.num_writes(now, MOST_SAVES))
        if self.shared is not None and self._unshared:
            copies += self._share(self.shared, self.tiers[-1].num_writes(now, MOST_SAVES))
        if copies:
            self.io.start(copies)

    def _save_blocks(self, num_spare: int, most: int) -> Iterator[BlockCopy]:
        skipped = 0 if num_spare >= most else MOST_SKIPPED
        for block_id, key in self._cache.unsaved(most + skipped):
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
            self.tiers[0].writes.begin(self._clock())
            yield copy
            most -= 1
            if most == 0:
                return

    def _move_oldest(self, number: int, most_writes: int) -> Iterator[BlockCopy]:
        slots, below = self.tiers[number].slots, self.tiers[number + 1].slots
        most = min(MOST_AHEAD, -(-slots.num_slots // 2))
        num_ahead = min(most, max(MOST_SAVES, slots.num_slots // AHEAD_SHARE))
        moving = self._moving_to(number + 1)
        num_more = min(num_ahead - slots.num_free, most_writes - len(moving))
        if num_more <= 0:
            return
        for key in slots.oldest(num_ahead):
            if key in below or key in moving:
                continue
            copy = self._move(key, number, number + 1)
            if copy is None:
                return
            yield copy
            num_more -= 1
            if num_more == 0:
                return

    def _share(self, number: int, most_writes: int) -> Iterator[BlockCopy]:
        """Copy new blocks of the first tier to the shared store, where other workers find them."""
        slots, shared, sharing = (
            self.tiers[0].slots,
            self.tiers[number].slots,
            self._moving_to(number),
        )
        while self._unshared and len(sharing) < most_writes:
            key = next(iter(self._unshared))
            if key in slots and key not in shared and key not in sharing:
                copy = self._move(key, 0, number)
                if copy is None:
                    return
                sharing.add(key)
                yield copy
            del self._unshared[key]

    def _moving_to(self, number: int) -> set[bytes]:
        return {copy.key for copy in self._moves.values() if copy.target.tier == number}

    def _move(self, key: bytes, number: int, below: int) -> BlockCopy | None:
        """None: all slots below are read or written."""
        target = self._reserve(below, key)
        if target is None:
            return None
        source = BlockPlace(number, self.tiers[number].slots.acquire(key, is_use=False))
        copy = BlockCopy(next(self._ids), key, source, target)
        self._moves[copy.copy_id] = copy
        self.tiers[below].writes.begin(self._clock())
        return copy

    def _queue_shared(self, key: bytes) -> None:
        if self.shared is not None:
            self._unshared[key] = None
            if len(self._unshared) > MOST_UNSHARED:
                del self._unshared[next(iter(self._unshared))]

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
        load = Load(run.keys, run.hits, blocks, self._clock(), Counter(run.tiers))
        load.tiers = tuple(dict.fromkeys(self.tiers[number].name for number in run.tiers))
        copies: list[BlockCopy] = []
        for (block_id, key), number in zip(blocks.items(), run.tiers, strict=True):
            self.tiers[number].reads.begin(load.started)
            source = BlockPlace(number, self.tiers[number].slots.acquire(key))
            copy = BlockCopy(next(self._ids), key, source, BlockPlace(POOL, block_id))
            self._reads[copy.copy_id] = (copy, load)
            self._loading[key] = load
            copies.append(copy)
        self.io.start(copies)
        return load

    def cancel(self, load: Load) -> None:
        """No request waits for it any more: what has arrived is kept, the rest is fenced."""
        load.cancelled = True
        copies = [copy for copy, its_load in self._reads.values() if its_load is load]
        self._pool.num_loading -= len(copies)
        for copy in copies:
            self._pool.quarantine([copy.target.slot])
            del load.blocks[copy.target.slot]
        self.io.cancel([copy.copy_id for copy in copies])
        self._end(load)

    def poll(self) -> list[Load]:
        """Take what has been copied; returns the loads that have ended, cancelled ones left out."""
        ended: list[Load | None] = []
        for answer in self.io.poll():
            if isinstance(answer, BlocksFound):
                self.found.append(answer)
            else:
                ended.append(self._take(answer))
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
        number = copy.target.tier
        tier = self.tiers[number]
        tier.writes.end(self._clock())
        if answer.outcome == "copied":
            tier.slots.commit(copy.target.slot)
            tier.stats.saved_bytes += self.io.block_bytes
            # a store of others may take blocks and answer no reads
            tier.succeed(tier.fullness, *(() if tier.is_shared else (tier.silence,)))
            if number == 0:
                self._queue_shared(copy.key)
            return
        tier.slots.discard(copy.target.slot)
        if answer.outcome == "damaged":
            self._lost(copy, "damaged")
        elif answer.outcome == "failed":
            tier.fail(answer.reason, self._clock(), tier.fullness)
            if number == self.shared:
                self._queue_shared(copy.key)

    def _was_read(self, copy: BlockCopy, load: Load, answer: BlockCopied) -> Load | None:
        tier, block_id = self.tiers[copy.source.tier], copy.target.slot
        tier.slots.release(copy.source.slot)
        tier.reads.end(self._clock())
        if answer.outcome == "copied":
            tier.stats.loaded_bytes += self.io.block_bytes
            tier.load_rate.add(answer.seconds, self._clock())
            tier.succeed()
        elif answer.outcome == "failed" and tier.is_shared:
            tier.fail(answer.reason, self._clock())
        elif answer.outcome != "cancelled":
            self._lost(copy, "absent" if answer.outcome == "absent" else "damaged")
            tier.succeed()
        if load.cancelled:
            self._pool.release_quarantined([block_id])
            return None
        self._pool.finish_receiving([block_id])
        self._pool.num_loading -= 1
        if answer.outcome == "copied":
            load.arrived.add(block_id)
        load.left -= Counter((copy.source.tier,))
        if load.left:
            return None
        self._end(load)
        return load

    def learn(self, keys: Sequence[bytes]) -> None:
        """Note that the shared store has these."""
        number = self.shared
        assert number is not None, "there is no shared store"
        slots = self.tiers[number].slots
        for key in reversed(keys):  # the first of them is the last to be forgotten
            if key in slots:
                slots.touch(key)
            elif not slots.is_writing(key):
                is_new = not self.holds(key)
                if (place := self._reserve(number, key)) is None:
                    return
                slots.commit(place.slot)
                if is_new:
                    self._cache.came_below(key)

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

    def _lost(self, copy: BlockCopy, how: Literal["damaged", "absent"]) -> None:
        """A tier does not have a block that it is known to have had."""
        tier = self.tiers[copy.source.tier]
        tier.slots.remove(copy.key)
        self._cache.left_below(copy.key)
        if how == "absent":
            tier.stats.absent += 1
            return
        tier.stats.damaged += 1
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
            num_writing = tier.slots.counts()["writing"]
            assert num_writing == tier.writes.num == num_writes, "a slot is written by no copy"
        for copy, load in self._reads.values():
            state = BlockState.QUARANTINED if load.cancelled else BlockState.RECEIVING
            assert self._pool.state(copy.target.slot) is state, "a load has lost its block"

    def _slots(self) -> list[TierSlots]:
        return [tier.slots for tier in self.tiers]

    def _loads(self) -> Collection[Load]:
        return {id(load): load for load in self._loading.values()}.values()
