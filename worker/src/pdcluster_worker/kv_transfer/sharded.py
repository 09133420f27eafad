"""A transport over the ports of an engine's ranks: one transfer is as many slices as ranks meet.

Guarantees what `engine.ports.Transport` asks for, of whole blocks: a block is
sent when the peer has all of its heads, an epoch ends when no slice of it reads
a block any more, and is fenced when every port has fenced it.  A slice that ends
ends the others.  One rank and one port of the peer are one slice.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import (
    BlocksSent,
    Fenced,
    SendEnded,
    TransferEvent,
    TransferRoute,
)
from pdcluster_worker.kv_transfer.head_shards import (
    HeadShard,
    ShardEnded,
    ShardPort,
    ShardSent,
    routes,
)
from pdcluster_worker.kv_transfer.layout import combined

_Peer = tuple[str, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class _SendShard:
    """A slice that one rank writes to one port of the peer."""

    part: HeadShard
    port: ShardPort
    address: str
    num_sent: int = 0
    checksum: int | None = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _ShardedSend:
    """One epoch that is being written.

    sources: blocks, in their order, of which the peer has not all heads; num_sent: those before.
    reason:  why it ends; set with the first slice that does.
    route:   of its blocks; where that differs, one with a note.
    """

    peer: _Peer
    slices: dict[range, _SendShard]
    sources: deque[int] = field(default_factory=deque)
    num_sent: int = 0
    reason: str | None = None
    route: TransferRoute | None = None

    @property
    def has_ended(self) -> bool:
        """No slice reads a block any more."""
        return all(one.has_ended for one in self.slices.values())


class ShardedTransport:
    """`engine.ports.Transport`.  ports: of all ranks, in the order of their heads.  wake: called
    when `poll` has something.
    """

    def __init__(self, ports: Sequence[ShardPort], wake: Callable[[], None]) -> None:
        self._ports = ports
        self._wake = wake
        self._num_heads = sum(len(port.heads) for port in ports)
        self._block_bytes = sum(port.block_bytes for port in ports)
        self._sendings: dict[bytes, _ShardedSend] = {}
        self._open: set[bytes] = set()
        self._fencing: dict[bytes, list[Fenced]] = {}
        self._events: list[TransferEvent] = []

    @property
    def ports(self) -> list[int]:
        """TCP ports that peers connect to, in the order of their heads."""
        return [port.port for port in self._ports]

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """See ports.Transport; blocks must be written in this order.

        Raises ValueError on a block that another epoch has open.
        """
        for port in self._ports:
            port.open(epoch, block_ids, verify=verify)
        self._open.add(epoch)

    def fence(self, epoch: bytes) -> None:
        """See ports.Transport; a second fence adds nothing while a port has not
        answered the first.
        """
        if epoch in self._open:
            self._open.remove(epoch)
            self._fencing[epoch] = []
            for port in self._ports:
                port.fence(epoch)
            return
        self._collect()
        if epoch not in self._fencing:
            self._add(Fenced(epoch, frozenset(), 0))

    def write(
        self,
        epoch: bytes,
        engine_id: str,
        addresses: Sequence[str],
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """See ports.Transport; after the epoch has ended blocks are dropped unread: its `SendEnded`
        speaks for them too.
        """
        peer = engine_id, tuple(addresses)
        sending = self._sendings.get(epoch)
        if sending is None:
            try:
                sending = _ShardedSend(peer, self._slices(epoch, peer))
            except ValueError as e:
                self._add(SendEnded(epoch, str(e)))
                return
            self._sendings[epoch] = sending
        if sending.peer != peer:
            raise ValueError(f"an epoch is written to one peer: {sending.peer}, not {peer}")
        if sending.reason is not None:
            return
        sending.sources.extend(source for source, _ in pairs)
        for one in sending.slices.values():
            one.port.write(one.part, engine_id, one.address, pairs, verify=verify)

    def checksum(self, epoch: bytes) -> int | None:
        """See ports.Transport; complete once the last `BlocksSent` has come."""
        sending = self._sendings.get(epoch)
        return (
            None if sending is None else combined(one.checksum for one in sending.slices.values())
        )

    def forget(self, epoch: bytes) -> None:
        """See ports.Transport; raises ValueError while writes are unacknowledged."""
        sending = self._sendings.get(epoch)
        if sending is None:
            return
        if sending.sources and not sending.has_ended:
            raise ValueError(
                "epoch has unacknowledged writes: cancel it and wait for SendEnded first"
            )
        del self._sendings[epoch]
        for one in sending.slices.values():
            one.port.forget(one.part)

    def cancel(self, epoch: bytes) -> None:
        """See ports.Transport; writes already on the wire may still arrive."""
        sending = self._sendings.get(epoch)
        if sending is None:
            self._add(SendEnded(epoch, "cancelled"))
        else:
            self._end(sending, "cancelled")

    def poll(self) -> list[TransferEvent]:
        """See ports.Transport."""
        self._collect()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See ports.Transport."""
        for port in self._ports:
            port.close()

    def _collect(self) -> None:
        """Take what ports have said."""
        for port in self._ports:
            for event in port.poll():
                match event:
                    case ShardSent():
                        self._sent(event)
                    case ShardEnded():
                        self._ended(event)
                    case Fenced():
                        self._fenced(event)

    def _add(self, event: SendEnded | Fenced) -> None:
        """An event of no port."""
        self._events.append(event)
        self._wake()

    def _slices(self, epoch: bytes, peer: _Peer) -> dict[range, _SendShard]:
        return {
            heads: _SendShard(HeadShard(epoch, heads), port, address)
            for port in self._ports
            for heads, address in routes(port.heads, self._num_heads, peer[1])
        }

    def _sent(self, event: ShardSent) -> None:
        sending = self._sendings.get(event.part.epoch)
        if sending is None:
            return
        one = sending.slices[event.part.heads]
        one.num_sent += len(event.block_ids)
        one.checksum = event.checksum
        if sending.route is None or event.route.note:
            sending.route = event.route
        if sending.reason is not None:
            return
        num_new = min(other.num_sent for other in sending.slices.values()) - sending.num_sent
        if num_new:
            sending.num_sent += num_new
            sent = tuple(sending.sources.popleft() for _ in range(num_new))
            self._events.append(
                BlocksSent(
                    event.part.epoch, sent, num_new * self._block_bytes, event.at, sending.route
                )
            )

    def _ended(self, event: ShardEnded) -> None:
        sending = self._sendings.get(event.part.epoch)
        if sending is None:
            return
        sending.slices[event.part.heads].has_ended = True
        self._end(sending, event.reason)
        if sending.has_ended:
            assert sending.reason is not None, "an end has a reason"
            self._events.append(SendEnded(event.part.epoch, sending.reason))

    def _end(self, sending: _ShardedSend, reason: str) -> None:
        """Stop every slice that goes on, once."""
        if sending.reason is None:
            sending.reason = reason
            for one in sending.slices.values():
                if not one.has_ended:
                    one.port.cancel(one.part)

    def _fenced(self, event: Fenced) -> None:
        """Whole once every port has answered; a block has arrived where all of its heads have."""
        answers = self._fencing.get(event.epoch)
        if answers is None:
            return
        answers.append(event)
        if len(answers) == len(self._ports):
            del self._fencing[event.epoch]
            received = frozenset.intersection(*(answer.received for answer in answers))
            num_bytes = sum(answer.num_bytes for answer in answers)
            checksum = combined(answer.checksum for answer in answers)
            self._events.append(Fenced(event.epoch, received, num_bytes, checksum))
