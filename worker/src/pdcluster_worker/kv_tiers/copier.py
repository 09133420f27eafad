"""Copies blocks between the pool and its tiers: one thread reads into the pool, one writes below.

Two, because a request waits for the one and none for the other.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.engine.tier_ports import (
    POOL,
    BlockCopied,
    BlockCopy,
    CopyOutcome,
    TierFacts,
)

logger = logging.getLogger(__name__)

WAKE_COPIES = 32
"""Answers after which the engine is woken though more copies are queued."""


class TierMemory(Protocol):
    """Slots of one tier.  Each is used by one thread at a time, and different ones by several."""

    facts: TierFacts

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        """Raises OSError where it takes no more."""

    def read(self, slot: int, key: bytes, target: memoryview) -> bool:
        """Return whether the slot held the block, whole; `target` is undefined where it did not."""

    def close(self) -> None:
        """No thread uses it any more."""


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
        self._wake = wake
        self._clock = clock
        self._answers: deque[BlockCopied] = deque()
        self._cancelled: set[int] = set()
        self._reads: SimpleQueue[BlockCopy | None] = SimpleQueue()
        self._writes: SimpleQueue[BlockCopy | None] = SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"kv-tier-{name}", daemon=True)
            for name, queue in (("reads", self._reads), ("writes", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            (self._reads if copy.target.tier == POOL else self._writes).put(copy)

    def cancel(self, copy_ids: Sequence[int]) -> None:
        self._cancelled.update(copy_ids)

    def poll(self) -> list[BlockCopied]:
        answers: list[BlockCopied] = []
        while self._answers:
            answers.append(self._answers.popleft())
            self._cancelled.discard(answers[-1].copy_id)
        return answers

    def close(self) -> None:
        self._closing.set()
        for queue in (self._reads, self._writes):
            queue.put(None)
        for thread in self._threads:
            thread.join()
        for tier in self._tiers:
            tier.close()

    def _run(self, queue: "SimpleQueue[BlockCopy | None]") -> None:
        unreported = 0
        while (copy := queue.get()) is not None and not self._closing.is_set():
            self._answers.append(self._answer(copy))
            unreported += 1
            if queue.empty() or unreported >= WAKE_COPIES:
                unreported = 0
                self._wake()

    def _answer(self, copy: BlockCopy) -> BlockCopied:
        if copy.copy_id in self._cancelled:
            return BlockCopied(copy.copy_id, "cancelled")
        started, reason = self._clock(), ""
        outcome: CopyOutcome = "failed"
        try:
            outcome = self._copy(copy)
        except OSError as e:
            reason = e.strerror or str(e)
        except Exception as e:  # the thread lives on: the engine waits for an answer of each copy
            logger.exception("copy of a kv block failed copy=%s", copy)
            reason = f"{type(e).__name__}: {e}"
        return BlockCopied(copy.copy_id, outcome, self._clock() - started, reason)

    def _copy(self, copy: BlockCopy) -> CopyOutcome:
        source, target = copy.source, copy.target
        if source.tier == POOL:
            block = self._memory.block(source.slot, self._heads)
        else:
            block = (
                self._memory.staging(target.slot, self._heads)
                if target.tier == POOL
                else memoryview(bytearray(self.block_bytes))
            )
            if not self._tiers[source.tier].read(source.slot, copy.key, block):
                return "damaged"
        if target.tier == POOL:
            self._memory.write_block(target.slot, block, self._heads)
        else:
            self._tiers[target.tier].write(target.slot, copy.key, block)
        return "copied"
