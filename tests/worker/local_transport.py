"""In-process transport for tests and benches, with the epoch rules and events of tcp."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_worker.engine.ports import KVMemory, TransferRoute
from pdcluster_worker.kv_transfer.inbox import DEAD_EPOCH, Inbox
from pdcluster_worker.kv_transfer.outbox import Frame, Outbox
from pdcluster_worker.kv_transfer.sharded import (
    EventQueue,
    HeadShard,
    Pairs,
    PeerAddress,
    ShardedTransport,
    ShardEvent,
    head_crcs,
)

LOCAL = TransferRoute("local")


@dataclass(frozen=True, slots=True)
class Delivery:
    """A slice of a block in flight; `data` is a copy."""

    sender: "LocalPort"
    frame: Frame
    data: bytes


class LocalFabric:
    """deferred: keep deliveries until `deliver_next` or `drop_next`, oldest first."""

    def __init__(self, deferred: bool = False) -> None:
        self._deferred = deferred
        self._ports: dict[str, list[LocalPort]] = {}
        self._pending: deque[Delivery] = deque()

    def attach(self, engine_id: str, ports: "list[LocalPort]") -> None:
        """Raises ValueError if the id is taken."""
        if engine_id in self._ports:
            raise ValueError(
                f"engine {engine_id} is attached already: an engine_id is new for every start"
            )
        self._ports[engine_id] = ports

    def detach(self, engine_id: str) -> None:
        """Deliveries to it are refused on arrival."""
        self._ports.pop(engine_id, None)

    def send(self, delivery: Delivery) -> None:
        self._pending.append(delivery)
        if not self._deferred:
            self.deliver_next()

    def deliver_next(self) -> bool:
        """Deliver the oldest block; False when there is none."""
        if not self._pending:
            return False
        delivery = self._pending.popleft()
        frame, outbox = delivery.frame, delivery.sender.outbox
        first_head = frame.send.part.heads.start
        receiver = next(
            (port for port in self._ports.get(frame.send.peer[0], ()) if first_head in port.heads),
            None,
        )
        refusal = (
            f"no engine {frame.send.peer[0]}"
            if receiver is None
            else receiver.accept(frame, delivery.data)
        )
        if refusal is None:
            outbox.acknowledge(frame, LOCAL)
        else:
            outbox.refuse(frame, refusal)
        return True

    def drop_next(self) -> bool:
        """Lose the oldest block: its sender sees a broken connection; False when there is none."""
        if not self._pending:
            return False
        delivery = self._pending.popleft()
        delivery.sender.outbox.fail(delivery.frame.send.peer, "connection reset by peer")
        return True


class LocalPort:
    """A `ShardPort` over a LocalFabric."""

    port = 0

    def __init__(
        self,
        fabric: LocalFabric,
        memory: KVMemory,
        wake: Callable[[], None],
        verify: bool,
        clock: Callable[[], float],
    ) -> None:
        self.heads = memory.heads
        self.block_bytes = memory.head_bytes * len(memory.heads)
        self._fabric = fabric
        self._memory = memory
        self._events = EventQueue(wake)
        self._inbox = Inbox(memory, verify, self._events.put)
        self.outbox = Outbox(verify, self._events.put, clock)

    def fence(self, epoch: bytes) -> None:
        self._inbox.fence(epoch)

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        self._inbox.open(epoch, block_ids, verify=verify)

    def write(
        self, part: HeadShard, peer: PeerAddress, pairs: Pairs, *, verify: bool = False
    ) -> None:
        """The bytes are read before this returns."""
        self.outbox.write(part, peer, pairs, verify=verify)
        while (frame := self.outbox.take(peer, max_blocks=1)) is not None:
            heads = frame.send.part.heads
            data = bytes(self._memory.block(frame.sources[0], heads))
            crcs = [head_crcs(data, len(heads))] if frame.send.verify else ()
            self.outbox.release(frame, crcs)
            self._fabric.send(Delivery(self, frame, data))

    def accept(self, frame: Frame, data: bytes) -> str | None:
        """Copy to the target; returns the reason for a refusal."""
        epoch, heads = frame.send.part
        arriving = self._inbox.claim(epoch, heads, frame.targets)
        if isinstance(arriving, str):
            return arriving
        target = frame.targets[0]

        def write_block() -> None:
            staging = self._memory.staging(target, heads)
            staging[:] = data
            self._memory.write_block(target, staging, heads)

        return None if self._inbox.complete(arriving, target, write_block) else DEAD_EPOCH

    def forget(self, part: HeadShard) -> None:
        self.outbox.forget(part)

    def cancel(self, part: HeadShard) -> None:
        """Writes in flight may still arrive."""
        self.outbox.cancel(part)

    def poll(self) -> list[ShardEvent]:
        return self._events.poll()

    def close(self) -> None:
        pass


class LocalTransport(ShardedTransport):
    """memories: of the engine's ranks, in the order of their heads."""

    def __init__(
        self,
        fabric: LocalFabric,
        memories: Sequence[KVMemory],
        engine_id: str,
        wake: Callable[[], None] = lambda: None,
        verify: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fabric = fabric
        self._engine_id = engine_id
        ports = [LocalPort(fabric, memory, wake, verify, clock) for memory in memories]
        super().__init__(ports, wake)
        fabric.attach(engine_id, ports)

    def close(self) -> None:
        self._fabric.detach(self._engine_id)
