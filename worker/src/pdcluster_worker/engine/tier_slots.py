"""Slots of one tier below the block pool: the block that each holds, and when it may be reused.

    free --reserve--> writing --commit--> stored --reserve evicts the oldest--> writing
                      writing --discard--> free
    stored --acquire--> stored, with readers: never evicted --release--> stored
                        stored, with readers --remove--> removed --last release--> free

Guarantees that a slot is in exactly one state and that no slot is written while it is read.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

MOST_READ = 256
"""Slots with readers that an eviction looks past before it gives up: more than copies to two tiers
below have, so that a tier that hangs does not stop the one above it.
"""


class ReservedSlot(NamedTuple):
    slot: int
    evicted: bytes | None  # block that was in it


class TierSlots:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_unused = num_slots  # from the end on: a list of all would be as long as the tier
        self._free: list[int] = []
        self._writing: dict[int, bytes] = {}
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._readers: dict[int, int] = {}  # of slots that have any
        self._removed: set[int] = set()  # no longer found, still read

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_free(self) -> int:
        return self._num_unused + len(self._free)

    def counts(self) -> dict[str, int]:
        return {
            "free": self.num_free,
            "writing": len(self._writing),
            "stored": len(self._stored),
            "removed": len(self._removed),
        }

    def restore(self, slot: int, key: bytes) -> None:
        """Take over a slot that was written before; all of them before any other call, the least
        recently used first.
        """
        if self._num_unused:
            self._free, self._num_unused = list(range(self.num_slots - 1, -1, -1)), 0
        self._stored[key] = slot

    def restored(self) -> None:
        """All slots are taken over."""
        taken = set(self._stored.values())
        self._free = [slot for slot in self._free if slot not in taken]

    def reserve(self, key: bytes) -> ReservedSlot | None:
        """A slot to write the block to; None while all are read or written."""
        assert key not in self._stored, "a block is stored twice in one tier"
        evicted = None
        if self._free:
            slot = self._free.pop()
        elif self._num_unused:
            slot = self.num_slots - self._num_unused
            self._num_unused -= 1
        else:
            oldest = islice(self._stored.items(), MOST_READ)
            found = next((each for each in oldest if each[1] not in self._readers), None)
            if found is None:
                return None
            evicted, slot = found
            del self._stored[evicted]
        self._writing[slot] = key
        return ReservedSlot(slot, evicted)

    def is_writing(self, key: bytes) -> bool:
        return key in self._writing.values()

    def commit(self, slot: int) -> None:
        """The block is whole in its slot, and found from now on."""
        self._stored[self._writing.pop(slot)] = slot

    def discard(self, slot: int) -> None:
        """The write failed: nothing of it is kept."""
        del self._writing[slot]
        self._free.append(slot)

    def acquire(self, key: bytes, *, is_use: bool = True) -> int:
        """Add a reader to the block's slot.  is_use: it is the most recently used one then."""
        slot = self._stored[key]
        if is_use:
            self._stored.move_to_end(key)
        self._readers[slot] = self._readers.get(slot, 0) + 1
        return slot

    def release(self, slot: int) -> None:
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
            if slot in self._removed:
                self._removed.remove(slot)
                self._free.append(slot)

    def touch(self, key: bytes) -> None:
        if key in self._stored:
            self._stored.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Forget a damaged block; its slot is free once no reader has it.  Unknown: a no-op."""
        slot = self._stored.pop(key, None)
        if slot is None:
            return
        if slot in self._readers:
            self._removed.add(slot)
        else:
            self._free.append(slot)

    def oldest(self, count: int) -> list[bytes]:
        return list(islice(self._stored, count))

    def check(self) -> None:
        """Assert that the states sum to the total and no slot is in two of them."""
        assert sum(self.counts().values()) == self.num_slots, (
            f"slots {self.counts()} do not sum to {self.num_slots}"
        )
        used = [*self._free, *self._writing, *self._stored.values(), *self._removed]
        assert len(set(used)) == len(used), "a slot is in two states"
        readable = {*self._stored.values(), *self._removed}
        assert self._readers.keys() <= readable, "a slot is read that holds no block"
        assert self._removed <= self._readers.keys(), "a removed slot has no reader"
