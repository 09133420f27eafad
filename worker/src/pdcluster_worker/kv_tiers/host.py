"""A tier in host memory: one run of bytes, a slot for each block."""

from typing import Any

import numpy as np

from pdcluster_worker.engine.tier_ports import TierFacts


class HostTier:
    """memory: a writable buffer of all slots."""

    def __init__(self, name: str, memory: Any, num_slots: int, block_bytes: int) -> None:
        self.facts = TierFacts(name, num_slots)
        self._slots = np.frombuffer(memory, dtype=np.uint8)[: num_slots * block_bytes].reshape(
            num_slots, block_bytes
        )

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        # numpy copies without the interpreter's lock, a memoryview does not
        np.copyto(self._slots[slot], np.frombuffer(block, dtype=np.uint8))

    def read(self, slot: int, key: bytes, target: memoryview) -> bool:
        """Return True: a slot of this process always holds its block."""
        np.copyto(np.frombuffer(target, dtype=np.uint8), self._slots[slot])
        return True

    def close(self) -> None:
        """The memory is the caller's."""
