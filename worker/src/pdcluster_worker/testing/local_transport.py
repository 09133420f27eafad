"""Transport between engines of one process, for tests and benches: blocks are copied at once, by
the writer's thread.

Epoch rules and events are those of tcp, because both use `kv_transfer.inbox`,
`kv_transfer.outbox` and `kv_transfer.sharded`.  A fabric may be deferred: written bytes then stay
"on the wire", one block a delivery, until the test lets the next one arrive or be lost,
which is how late and lost writes are explored without sockets or threads.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_worker.engine.ports import KVMemory, TransferRoute
from pdcluster_worker.kv_transfer.events import EventQueue
from pdcluster_worker.kv_transfer.head_shards import HeadShard, ShardEvent
from pdcluster_worker.kv_transfer.inbox import DEAD_EPOCH, Inbox
from pdcluster_worker.kv_transfer.layout import head_crcs
from pdcluster_worker.kv_transfer.outbox import Frame, Outbox
from pdcluster_worker.kv_transfer.sharded import ShardedTransport

LOCAL = TransferRoute("local")


@dataclass(frozen=True, slots=True)
class Delivery:
    """A slice of one block that has left its sender (`data` is a copy: the source may change) and
    has not arrived.
    """

    sender: "LocalPort"
    frame: Frame
    data: bytes


class LocalFabric:
    """The engines that can reach each other, by engine_id, and what is on the way between them.

    deferred: keep deliveries until `deliver_next` or `drop_next`, oldest first.
    """

    def __init__(self, deferred: bool = False) -> None:
        self._deferred = deferred
        self._ports: dict[str, list[LocalPort]] = {}
        self._pending: deque[Delivery] = deque()

    @property
    def num_pending(self) -> int:
        """Deliveries on the way."""
        return len(self._pending)

    def attach(self, engine_id: str, ports: "list[LocalPort]") -> None:
        """Make an engine reachable.  Raises ValueError if the id is taken."""
        if engine_id in self._ports:
            raise ValueError(
                f"engine {engine_id} is attached already: an engine_id is new for every start"
            )
        self._ports[engine_id] = ports

    def detach(self, engine_id: str) -> None:
        """Make an engine unreachable: what is still on the way to it is refused on arrival."""
        self._ports.pop(engine_id, None)

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
        """Lose the oldest block: its sender sees a broken connection, later blocks may still
        arrive; False when nothing is on the way.
        """
        if not self._pending:
            return False
        delivery = self._pending.popleft()
        delivery.sender.outbox.fail(delivery.frame.send.peer, "connection reset by peer")
        return True


class LocalPort:
    """`head_shards.ShardPort` over a LocalFabric."""

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
        """See head_shards.ShardPort."""
        self._inbox.fence(epoch)

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """See head_shards.ShardPort."""
        self._inbox.open(epoch, block_ids, verify=verify)

    def write(
        self,
        part: HeadShard,
        engine_id: str,
        address: str,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """See head_shards.ShardPort; the bytes are read before this returns."""
        peer = (engine_id, address)
        self.outbox.write(part, peer, pairs, verify=verify)
        while (frame := self.outbox.take(peer, max_blocks=1)) is not None:
            heads = frame.send.part.heads
            data = bytes(self._memory.block(frame.sources[0], heads))
            crcs = [head_crcs(data, len(heads))] if frame.send.verify else ()
            self.outbox.release(frame, crcs)
            self._fabric.send(Delivery(self, frame, data))

    def accept(self, frame: Frame, data: bytes) -> str | None:
        """Copy what arrived into its target; returns why not when it is refused."""
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
        """See head_shards.ShardPort."""
        self.outbox.forget(part)

    def cancel(self, part: HeadShard) -> None:
        """See head_shards.ShardPort; writes already on the wire may still arrive."""
        self.outbox.cancel(part)

    def poll(self) -> list[ShardEvent]:
        """See head_shards.ShardPort."""
        return self._events.poll()

    def close(self) -> None:
        """Nothing is left open."""


class LocalTransport(ShardedTransport):
    """`engine.ports.Transport` over a LocalFabric.

    A peer is found by engine_id, and its port by the head that arrives: of its
    addresses their number alone counts.

    memories: of the engine's ranks, in the order of their heads.  clock: the engine's.
    """

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
        """See ports.Transport."""
        self._fabric.detach(self._engine_id)
