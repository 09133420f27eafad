"""Copies blocks between the pool and its tiers, and asks shared stores what they have.

Each tier has threads of its own: one reads it into the pool, one writes to it, and one asks a
shared store.  A tier that does not answer holds up neither requests nor other tiers.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

import numpy as np

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopied,
    BlockCopy,
    BlockLookup,
    BlocksFound,
    CopyOutcome,
    TierAnswer,
    TierFacts,
)

logger = logging.getLogger(__name__)

WAKE_COPIES = 32
"""Answers after which the engine is woken though more copies are queued."""

CLOSE_SECONDS = 2.0
"""Time for all threads to end; one that a disk holds up ends with the process."""


class TierMemory(Protocol):
    """Slots of one tier.  Each is used by one thread at a time, and different ones by several."""

    facts: TierFacts

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        """Raises OSError where it takes no more."""

    def read(self, slot: int, key: bytes, target: memoryview) -> bool:
        """Return whether the slot held the block, whole; `target` is undefined where it did not.

        Raises LookupError where a shared store has no such block, OSError where it does not answer.
        """

    def close(self) -> None:
        """No thread uses it any more."""


@runtime_checkable
class SharedMemory(TierMemory, Protocol):
    """A tier that other workers write to as well."""

    def has(self, keys: Sequence[bytes]) -> int:
        """Keys before the first that is not there.  Raises OSError where it does not answer."""


class TierCopier:
    """The KVTierIO of a worker.  wake: called after answers; thread-safe."""

    def __init__(
        self,
        memory: KVMemory,
        heads: range,
        tiers: Sequence[TierMemory],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = [tier.facts for tier in tiers]
        self.block_bytes = len(heads) * memory.head_bytes
        self._memory = memory
        self._heads = heads
        self._tiers = tiers
        self._clock = clock
        self._answers: deque[TierAnswer] = deque()
        self._reads = [_Lane(f"kv-{tier.name}-reads", self, wake) for tier in self.tiers]
        self._writes = [_Lane(f"kv-{tier.name}-writes", self, wake) for tier in self.tiers]
        self._lookups = {
            number: _Lane(f"kv-{tier.name}-lookups", self, wake)
            for number, tier in enumerate(self.tiers)
            if tier.store
        }

    def start(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            source, target = copy.source.tier, copy.target.tier
            lane = self._reads[source] if target == POOL else self._writes[target]
            lane.outstanding.add(copy.copy_id)
            lane.queue.put(copy)

    def cancel(self, copy_ids: Sequence[int]) -> None:
        """Answers reads at once, however long their tier takes: a read writes to its block at its
        end, and no more then.
        """
        for lane in self._reads:
            with lane.lock:
                cancelled = lane.outstanding.intersection(copy_ids)
                lane.outstanding -= cancelled
            self._answers += [BlockCopied(copy_id, "cancelled") for copy_id in cancelled]

    def look_up(self, lookup: BlockLookup) -> None:
        self._lookups[lookup.tier].queue.put(lookup)

    def poll(self) -> list[TierAnswer]:
        answers: list[TierAnswer] = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def close(self) -> None:
        """A tier whose threads do not end in time stays open until the process ends."""
        lanes = [*self._reads, *self._writes, *self._lookups.values()]
        for lane in lanes:
            lane.end()
        until = self._clock() + CLOSE_SECONDS
        stuck = [lane.name for lane in lanes if not lane.ended(until - self._clock())]
        if stuck:
            logger.warning("kv tiers do not answer: left as they are threads=%s", ",".join(stuck))
        for tier in self._tiers:
            if not any(name.startswith(f"kv-{tier.facts.name}-") for name in stuck):
                tier.close()

    def answer(self, job: BlockCopy | BlockLookup, lane: "_Lane") -> None:
        """Do what a thread has taken from its queue."""
        if isinstance(job, BlockLookup):
            self._answers.append(self._look_up(job))
        elif job.copy_id in lane.outstanding and (answer := self._copy(job, lane)) is not None:
            self._answers.append(answer)

    def _look_up(self, lookup: BlockLookup) -> BlocksFound:
        started, tier = self._clock(), self._tiers[lookup.tier]
        assert isinstance(tier, SharedMemory)
        num_found, reason = 0, ""
        try:
            num_found = tier.has(lookup.keys)
        except Exception as e:
            reason = _reason(e, lookup)
        return BlocksFound(lookup.lookup_id, num_found, self._clock() - started, reason)

    def _copy(self, copy: BlockCopy, lane: "_Lane") -> BlockCopied | None:
        """None: it was cancelled, and is answered."""
        started, reason, is_read = self._clock(), "", copy.target.tier == POOL
        outcome: CopyOutcome = "failed"
        try:
            outcome = self._read(copy, lane.buffer) if is_read else self._write(copy)
        except LookupError:
            outcome = "absent"
        except Exception as e:  # the thread lives on: the engine waits for an answer of each copy
            reason = _reason(e, copy)
        with lane.lock:
            if copy.copy_id not in lane.outstanding:
                return None
            lane.outstanding.remove(copy.copy_id)
            if is_read and outcome == "copied":
                block = self._memory.staging(copy.target.slot, self._heads)
                np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(lane.buffer, np.uint8))
                self._memory.write_block(copy.target.slot, block, self._heads)
        return BlockCopied(copy.copy_id, outcome, self._clock() - started, reason)

    def _read(self, copy: BlockCopy, buffer: memoryview) -> CopyOutcome:
        is_whole = self._tiers[copy.source.tier].read(copy.source.slot, copy.key, buffer)
        return "copied" if is_whole else "damaged"

    def _write(self, copy: BlockCopy) -> CopyOutcome:
        source, target = copy.source, copy.target
        if source.tier == POOL:
            block = self._memory.block(source.slot, self._heads)
        else:
            block = memoryview(bytearray(self.block_bytes))
            if not self._tiers[source.tier].read(source.slot, copy.key, block):
                return "damaged"
        self._tiers[target.tier].write(target.slot, copy.key, block)
        return "copied"


class _Lane:
    """A thread and its queue."""

    def __init__(self, name: str, copier: TierCopier, wake: Callable[[], None]) -> None:
        self.name = name
        self.queue: SimpleQueue[BlockCopy | BlockLookup | None] = SimpleQueue()
        self.lock = threading.Lock()  # held while a read writes to the pool
        self.outstanding: set[int] = set()  # copies that are to be answered
        self.buffer = memoryview(bytearray(copier.block_bytes))  # of one read at a time
        self._closing = threading.Event()
        self._copier = copier
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._closing.set()
        self.queue.put(None)

    def ended(self, seconds: float) -> bool:
        """Wait for the thread, at most so long."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        unreported = 0
        while (job := self.queue.get()) is not None and not self._closing.is_set():
            self._copier.answer(job, self)
            unreported += 1
            if self.queue.empty() or unreported >= WAKE_COPIES:
                unreported = 0
                self._wake()


def _reason(error: Exception, job: object) -> str:
    """Text for a log and a metric; an error that no tier raises is logged as a fault of ours."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    logger.exception("a kv tier failed job=%s", job)
    return f"{type(error).__name__}: {error}"
