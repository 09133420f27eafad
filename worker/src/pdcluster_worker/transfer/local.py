"""Transport between engines of one process: blocks are copied at once, by the writer's thread.

Epoch rules and events are those of tcp, because both use `transfer.inbox` and
`transfer.outbox`.  A fabric may be deferred: written bytes then stay "on the
wire", one block a delivery, until the test lets the next one arrive or be lost,
which is how late and lost writes are explored without sockets or threads.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_worker.engine.ports import KVMemory, TransferEvent
from pdcluster_worker.transfer.events import EventQueue
from pdcluster_worker.transfer.inbox import Inbox
from pdcluster_worker.transfer.layout import block_crc
from pdcluster_worker.transfer.outbox import Frame, Outbox


@dataclass(frozen=True, slots=True)
class Delivery:
    """One block that has left its sender (`data` is a copy: the source may change) and has not arrived."""

    sender: "LocalTransport"
    frame: Frame
    data: bytes


class LocalFabric:
    """The engines that can reach each other, by engine_id, and what is on the way between them.

    deferred: keep deliveries until `deliver_next` or `drop_next`, oldest first.
    """

    def __init__(self, deferred: bool = False) -> None:
        self._deferred = deferred
        self._transports: dict[str, LocalTransport] = {}
        self._pending: deque[Delivery] = deque()

    @property
    def num_pending(self) -> int:
        """Deliveries on the way."""
        return len(self._pending)

    def attach(self, engine_id: str, transport: "LocalTransport") -> None:
        """Make an engine reachable.  Raises ValueError if the id is taken."""
        if engine_id in self._transports:
            raise ValueError(f"engine {engine_id} is attached already: an engine_id is new for every start")
        self._transports[engine_id] = transport

    def detach(self, engine_id: str) -> None:
        """Make an engine unreachable: what is still on the way to it is refused on arrival."""
        self._transports.pop(engine_id, None)

    def send(self, delivery: Delivery) -> None:
        """Put a block on the wire."""
        self._pending.append(delivery)
        if not self._deferred:
            self.deliver_next()

    def deliver_next(self) -> bool:
        """Let the oldest block arrive and be answered; False when nothing is on the way."""
        if not self._pending:
            return False
        delivery = self._pending.popleft()
        frame, outbox = delivery.frame, delivery.sender.outbox
        receiver = self._transports.get(frame.send.peer[0])
        refusal = f"no engine {frame.send.peer[0]}" if receiver is None else receiver.accept(frame, delivery.data)
        if refusal is None:
            outbox.acknowledge(frame)
        else:
            outbox.refuse(frame, refusal)
        return True

    def drop_next(self) -> bool:
        """Lose the oldest block: its sender sees a broken connection, later blocks may still arrive; False when nothing is on the way."""
        if not self._pending:
            return False
        delivery = self._pending.popleft()
        delivery.sender.outbox.fail(delivery.frame.send.peer, "connection reset by peer")
        return True


class LocalTransport:
    """`engine.ports.Transport` over a LocalFabric; addresses are ignored, peers are found by engine_id.

    clock: the engine's.
    """

    port = 0

    def __init__(
        self,
        fabric: LocalFabric,
        memory: KVMemory,
        engine_id: str,
        wake: Callable[[], None] = lambda: None,
        verify: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fabric = fabric
        self._memory = memory
        self._engine_id = engine_id
        self._verify = verify
        self._events = EventQueue(wake)
        self._inbox = Inbox(memory, verify, self._events.put)
        self.outbox = Outbox(memory.block_bytes, verify, self._events.put, clock)
        fabric.attach(engine_id, self)

    def open(self, epoch: bytes, block_ids: Sequence[int]) -> None:
        """See ports.Transport."""
        self._inbox.open(epoch, block_ids)

    def fence(self, epoch: bytes) -> None:
        """See ports.Transport."""
        self._inbox.fence(epoch)

    def write(self, epoch: bytes, engine_id: str, address: str, pairs: Sequence[tuple[int, int]]) -> None:
        """See ports.Transport; the bytes are read before this returns."""
        peer = (engine_id, address)
        self.outbox.write(epoch, peer, pairs)
        while (frame := self.outbox.take(peer, max_blocks=1)) is not None:
            data = bytes(self._memory.block(frame.sources[0]))
            self.outbox.release(frame, [block_crc(data)] if self._verify else ())
            self._fabric.send(Delivery(self, frame, data))

    def accept(self, frame: Frame, data: bytes) -> str | None:
        """Copy an arrived block into its target; returns why not when it is refused."""
        receiving = self._inbox.claim(frame.send.epoch, frame.targets)
        if isinstance(receiving, str):
            return receiving
        if not self._inbox.enter(receiving):
            return "dead epoch"
        landing = self._memory.landing(frame.targets[0])
        try:
            landing[:] = data
        finally:
            self._inbox.leave(receiving)
        return None if self._inbox.complete(receiving, frame.targets[0], landing) else "dead epoch"

    def checksum(self, epoch: bytes) -> int | None:
        """See ports.Transport."""
        return self.outbox.checksum(epoch)

    def forget(self, epoch: bytes) -> None:
        """See ports.Transport; raises ValueError while writes are unacknowledged."""
        self.outbox.forget(epoch)

    def cancel(self, epoch: bytes) -> None:
        """See ports.Transport; writes already on the wire may still arrive."""
        self.outbox.cancel(epoch)

    def poll(self) -> list[TransferEvent]:
        """See ports.Transport."""
        return self._events.poll()

    def close(self) -> None:
        """See ports.Transport."""
        self._fabric.detach(self._engine_id)
