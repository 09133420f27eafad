"""A carrier brings the payloads of frames beside their connection, between slots of two ports."""

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pdcluster_worker.engine.ports import KVMemory, SlotMemory
from pdcluster_worker.errors import PeerError

SENDING_SLOTS = 16
RECEIVING_SLOTS = 8
"""Frames that a port fetches at the same time; each of its connections fetches one."""

SLOT_SECONDS = 30.0
"""Longest wait for a slot: others are given back within a fetch."""


class CarrierError(PeerError):
    """The carrier cannot bring this, or reach that peer."""


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one frame: the bytes of `memory` from `start` on."""

    memory: SlotMemory
    start: int
    num_bytes: int
    # False while a carrier may still read or write it.
    is_idle: Callable[[], bool] = field(default=lambda: True)

    @property
    def bytes(self) -> Any:
        return self.memory.array[self.start : self.start + self.num_bytes]

    @property
    def address(self) -> int:
        return self.memory.address + self.start


Fetch = Callable[[], bool]
"""A payload on its way into a slot: True once all of it is there.  Raises CarrierError if it will
not come.
"""


class CarrierOutgoing(Protocol):
    """The sending side of one connection.  blob: what the receiver's side is given of it."""

    blob: bytes

    def connect(self, blob: bytes) -> None:
        """Take what the receiver's side said.  Raises CarrierError."""

    def post(self, slot: Slot, num_bytes: int) -> int:
        """Offer the first bytes of a slot; returns the number that names them to the receiver."""

    def close(self) -> None:
        """Offer nothing more."""


class CarrierIncoming(Protocol):
    """The receiving side of one connection.  blob: what the sender's side is given of it."""

    blob: bytes

    def fetch(self, place: int, num_bytes: int, slot: Slot) -> Fetch:
        """Begin to bring what the sender offered under that number.  Raises CarrierError."""

    def close(self) -> None:
        """Begin nothing more; what is on its way may still come."""


class Carrier(Protocol):
    """One per port.  kind: its name in hellos, metrics and settings."""

    kind: str
    sending: "SlotPool"
    receiving: "SlotPool"

    def outgoing(self) -> CarrierOutgoing:
        """For a connection to a peer."""

    def incoming(self, blob: bytes) -> CarrierIncoming:
        """For a connection of a peer, by what it said.  Raises CarrierError."""

    def close(self) -> None:
        """End its threads and free its memory, after all connections."""


class SlotPool:
    """Slots of one side of a port; a slot whose fetch was abandoned returns once that ends."""

    def __init__(self, make: Callable[[int], list[Slot]], num_slots: int) -> None:
        """make: registers memory for so many slots."""
        self._make = make
        self._free = make(num_slots)
        self._busy: list[Slot] = []
        self._changed = threading.Condition()

    def take(self, seconds: float = 0.0) -> Slot | None:
        """A slot, after at most so many seconds; None where all are in use."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if self._busy and not self._free:
                    # One that has become idle comes beside the one that took its place.
                    idle = [slot for slot in self._busy if slot.is_idle()]
                    self._busy = [slot for slot in self._busy if slot not in idle]
                    self._free.extend(idle)
                if self._free:
                    return self._free.pop()
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def give_back(self, slot: Slot) -> None:
        with self._changed:
            (self._free if slot.is_idle() else self._busy).append(slot)
            self._changed.notify()

    def lose(self, slot: Slot, fetch: Fetch) -> None:
        """Give back a slot into which a fetch may still bring bytes."""

        def has_ended() -> bool:
            try:
                return fetch()
            except CarrierError:
                return True

        slot.is_idle = has_ended
        if has_ended():
            self.give_back(slot)
            return
        (other,) = self._make(1)
        with self._changed:
            self._busy.append(slot)
            self._free.append(other)
            self._changed.notify()


class HostSlots:
    """`engine.ports.SlotMemory` of the host, for blocks wherever they are."""

    device: int | None = None

    def __init__(self, blocks: KVMemory, num_bytes: int) -> None:
        self._blocks = blocks
        self.array = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self.address: int = self.array.ctypes.data

    def write(self, start: int, data: bytes | memoryview) -> None:
        # not array[...] = data, which would keep the interpreter's lock
        np.copyto(self.array[start : start + len(data)], np.frombuffer(data, np.uint8))

    def read(self, start: int, num_bytes: int) -> bytes:
        return self.array[start : start + num_bytes].tobytes()

    def load(self, start: int, block_id: int, heads: range) -> None:
        self.write(start, self._blocks.block(block_id, heads))

    def write_block(self, start: int, block_id: int, heads: range) -> None:
        staging = self._blocks.staging(block_id, heads)
        # as in `write`
        np.copyto(np.frombuffer(staging, np.uint8), self.array[start : start + len(staging)])
        self._blocks.write_block(block_id, staging, heads)


def slots_of(memory: SlotMemory, slot_bytes: int, num_slots: int) -> list[Slot]:
    """Its first bytes as slots."""
    return [Slot(memory, index * slot_bytes, slot_bytes) for index in range(num_slots)]
