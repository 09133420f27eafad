"""A network for engine tests that moves one block per call, at the worst moment allowed."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import (
    BlocksSent,
    Fenced,
    KVMemory,
    SendEnded,
    TransferEvent,
    TransferRoute,
)


@dataclass(slots=True)
class _Opened:
    block_ids: list[int]
    verify: bool = False
    received: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sending:
    engine_id: str
    verify: bool = False
    queued: deque[tuple[int, int]] = field(default_factory=deque)
    checksum: int = 0
    cancelled: bool = False
    ended: bool = False


class FakeNetwork:
    """corrupt_next: flip a bit of the next block that arrives."""

    def __init__(self) -> None:
        self.transports: dict[str, FakeTransport] = {}
        self.corrupt_next = False

    def deliver_all(self) -> None:
        for transport in self.transports.values():
            while transport.deliver():
                pass


class FakeTransport:
    """A `Transport` over a FakeNetwork.

    holding:  keep fences and cancels unanswered until `settle`.
    on_read:  called with a source block when its bytes leave.
    on_write: called with a target block when bytes land in it.
    """

    def __init__(
        self,
        network: FakeNetwork,
        memory: KVMemory,
        engine_id: str,
        clock: Callable[[], float],
        verify: bool = False,
    ) -> None:
        self.holding = False
        self.on_read: Callable[[int], None] = lambda block_id: None
        self.on_write: Callable[[int], None] = lambda block_id: None
        self.forgotten: list[bytes] = []
        self._network = network
        self._memory = memory
        self._clock = clock
        self.verify = verify
        self._opened: dict[bytes, _Opened] = {}
        self._sending: dict[bytes, _Sending] = {}
        self._held: list[Callable[[], None]] = []
        self._events: list[TransferEvent] = []
        network.transports[engine_id] = self

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        assert epoch not in self._opened, "an epoch is opened once"
        assert not set(block_ids) & {
            block for opened in self._opened.values() for block in opened.block_ids
        }, "a block is open twice"
        self._opened[epoch] = _Opened(list(block_ids), verify or self.verify)

    def fence(self, epoch: bytes) -> None:
        self._answer(lambda: self._close_epoch(epoch))

    def write(
        self,
        epoch: bytes,
        engine_id: str,
        addresses: Sequence[str],
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        sending = self._sending.setdefault(epoch, _Sending(engine_id, verify or self.verify))
        if not sending.ended:
            sending.queued.extend(pairs)

    def checksum(self, epoch: bytes) -> int | None:
        sending = self._sending[epoch]
        return sending.checksum if sending.verify else None

    def forget(self, epoch: bytes) -> None:
        self.forgotten.append(epoch)
        self._sending.pop(epoch, None)

    def cancel(self, epoch: bytes) -> None:
        if (sending := self._sending.get(epoch)) is not None:
            sending.cancelled = True
        self._answer(lambda: self._end(epoch, "cancelled"))

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        pass

    def deliver(self) -> bool:
        """Move the oldest queued block; False when nothing is queued."""
        for epoch, sending in self._sending.items():
            if sending.queued:
                self._deliver_block(epoch, sending)
                return True
        return False

    def queued_blocks(self) -> list[int]:
        """Source blocks that have not moved yet."""
        return [source for sending in self._sending.values() for source, _ in sending.queued]

    def fail(self, reason: str) -> None:
        """Break the connection: every epoch with queued blocks ends."""
        for epoch in [
            epoch
            for epoch, sending in self._sending.items()
            if sending.queued and not sending.cancelled
        ]:
            self._end(epoch, reason)

    def settle(self) -> None:
        """Answer the fences and cancels that were held."""
        held, self._held = self._held, []
        for answer in held:
            answer()

    def _answer(self, answer: Callable[[], None]) -> None:
        if self.holding:
            self._held.append(answer)
        else:
            answer()

    def _deliver_block(self, epoch: bytes, sending: _Sending) -> None:
        source, target = sending.queued.popleft()
        self.on_read(source)
        data = bytes(self._memory.block(source))
        sending.checksum = zlib.crc32(data, sending.checksum)
        if not self._network.transports[sending.engine_id]._accept(epoch, target, data):
            self._end(epoch, "refused: dead epoch")
        elif not sending.cancelled:
            self._events.append(
                BlocksSent(
                    epoch, (source,), len(data), at=self._clock(), route=TransferRoute("fake")
                )
            )

    def _accept(self, epoch: bytes, target: int, data: bytes) -> bool:
        opened = self._opened.get(epoch)
        if opened is None:
            return False
        assert opened.block_ids[len(opened.received)] == target, (
            f"block {target} is written out of order or twice"
        )
        self.on_write(target)
        if self._network.corrupt_next:
            self._network.corrupt_next = False
            data = bytes([data[0] ^ 1]) + data[1:]
        self._memory.block(target)[:] = data
        opened.received.append(target)
        return True

    def _close_epoch(self, epoch: bytes) -> None:
        opened = self._opened.pop(epoch, _Opened([]))
        checksum: int | None = None
        if opened.verify and opened.received == opened.block_ids:
            checksum = 0
            for block_id in opened.block_ids:
                checksum = zlib.crc32(self._memory.block(block_id), checksum)
        num_bytes = len(opened.received) * len(self._memory.heads) * self._memory.head_bytes
        self._events.append(Fenced(epoch, frozenset(opened.received), num_bytes, checksum))

    def _end(self, epoch: bytes, reason: str) -> None:
        # An epoch ends once; a cancel of one that has failed meanwhile is answered by that failure.
        sending = self._sending.get(epoch)
        if sending is not None:
            if sending.ended:
                return
            sending.ended = True
            sending.queued.clear()
        self._events.append(SendEnded(epoch, reason))
