"""A transport over the ports of an engine's ranks, each of which moves its heads of every block.
Checksums are the same on both sides, however ranks share the heads.

The ranks of an engine share the KV heads evenly, in their order, and each has a KV port.  Between
engines of unequal sizes a rank writes to every port that takes some of its heads.  A block is sent
when the peer has all of its heads; an epoch ends when no shard of it reads a block any more, and is
fenced when every port has fenced it.  A shard that ends ends the others.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdcluster_worker.engine.ports import (
    BlocksSent,
    Fenced,
    SendEnded,
    TransferEvent,
    TransferRoute,
)

CHECKSUM_START = 0xCBF29CE484222325
"""The offset basis of 64-bit FNV-1a, whose step also folds the CRCs."""

_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def head_crcs(block: bytes | bytearray | memoryview, num_heads: int) -> tuple[int, ...]:
    """CRC-32 of each head's bytes in (a shard of) one block."""
    size = len(block) // num_heads
    return tuple(
        zlib.crc32(block[start : start + size]) for start in range(0, size * num_heads, size)
    )


class ShardChecksum:
    """The checksum of some heads, as blocks are added."""

    __slots__ = ("_folds",)

    def __init__(self, heads: range) -> None:
        self._folds = [_fold(CHECKSUM_START, head) for head in heads]

    def extend(self, blocks: Iterable[Sequence[int]]) -> None:
        """Add the CRCs of the next blocks (`head_crcs`); order matters."""
        for crcs in blocks:
            self._folds = [_fold(fold, crc) for fold, crc in zip(self._folds, crcs, strict=True)]

    @property
    def value(self) -> int:
        return sum(self._folds) & _MASK


def combined(slices: Iterable[int | None]) -> int | None:
    """The checksum of all shards together; None where one has none."""
    total = 0
    for checksum in slices:
        if checksum is None:
            return None
        total += checksum
    return total & _MASK


def _fold(checksum: int, value: int) -> int:
    return ((checksum ^ value) * _PRIME) & _MASK


PeerAddress = tuple[str, str]
"""(engine_id, address): a restarted engine is another peer."""

Pairs = Sequence[tuple[int, int]]
"""(source block here, target block there)."""


class HeadShard(NamedTuple):
    """Heads of each block that one rank writes to one port under an epoch."""

    epoch: bytes
    heads: range


@dataclass(frozen=True, slots=True)
class ShardSent:
    """The peer has these heads of these source blocks."""

    part: HeadShard
    block_ids: tuple[int, ...]
    # Of the shard as far as it was sent, None when verification is off.
    checksum: int | None = field(compare=False)
    at: float = field(compare=False)
    route: TransferRoute = field(compare=False)


@dataclass(frozen=True, slots=True)
class ShardEnded:
    """No source block of the shard is read any more; see `engine.ports.SendEnded`."""

    part: HeadShard
    reason: str


ShardEvent = ShardSent | ShardEnded | Fenced
"""Event of one port.  Fenced: what it received, of the heads that it takes."""

Emit = Callable[[ShardEvent], None]


class ShardPort(Protocol):
    """One rank's end of transfers, as `engine.ports.Transport`, of its heads alone."""

    heads: range  # that it sends and receives
    block_bytes: int  # of its heads of one block
    port: int  # that peers connect to; 0 when there is none

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Once it returns, no write into its heads of these blocks is refused as too early."""

    def fence(self, epoch: bytes) -> None:
        """Close the epoch here; Fenced follows."""

    def write(
        self, part: HeadShard, peer: PeerAddress, pairs: Pairs, *, verify: bool = False
    ) -> None:
        """Queue writes of these heads."""

    def forget(self, part: HeadShard) -> None:
        """Drop the record of a finished shard."""

    def cancel(self, part: HeadShard) -> None:
        """Stop sending; ShardEnded follows."""

    def poll(self) -> list[ShardEvent]:
        """Events since the last call, in order."""

    def close(self) -> None:
        """Stop all threads and sockets."""


def shares(num_heads: int, num_ports: int) -> list[range]:
    """The heads of each port.  Raises ValueError where they cannot be shared evenly.

    >>> shares(8, 2)
    [range(0, 4), range(4, 8)]
    """
    if num_ports < 1 or num_heads % num_ports:
        raise ValueError(f"{num_ports} KV ports cannot share {num_heads} KV heads evenly")
    size = num_heads // num_ports
    return [range(start, start + size) for start in range(0, num_heads, size)]


def routes(held: range, num_heads: int, addresses: Sequence[str]) -> list[tuple[range, str]]:
    """Return which of the held heads go to which address of the peer, whose ports share all heads.

    >>> routes(range(0, 4), 4, ["a", "b"])
    [(range(0, 2), 'a'), (range(2, 4), 'b')]
    >>> routes(range(2, 4), 4, ["a"])
    [(range(2, 4), 'a')]
    """
    taken = zip(shares(num_heads, len(addresses)), addresses, strict=True)
    common = [
        (range(max(held.start, heads.start), min(held.stop, heads.stop)), address)
        for heads, address in taken
    ]
    return [(heads, address) for heads, address in common if heads]


class EventQueue:
    """Many threads put, one polls; neither waits."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[ShardEvent] = deque()
        self._wake = wake

    def put(self, event: ShardEvent) -> None:
        self._events.append(event)
        self._wake()

    def poll(self) -> list[ShardEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]


_Peer = tuple[str, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class _SendShard:
    """A shard that one rank writes to one port of the peer."""

    part: HeadShard
    port: ShardPort
    address: str
    num_sent: int = 0
    checksum: int | None = None
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class _ShardedSend:
    """One epoch that is being written."""

    peer: _Peer
    slices: dict[range, _SendShard]
    # Blocks, in their order, of which the peer has not all heads; num_sent: those before.
    sources: deque[int] = field(default_factory=deque)
    num_sent: int = 0
    reason: str | None = None  # why it ends; set with the first shard that does
    route: TransferRoute | None = None  # of its blocks; where that differs, one with a note

    @property
    def has_ended(self) -> bool:
        return all(one.has_ended for one in self.slices.values())


class ShardedTransport:
    """`engine.ports.Transport`.  ports: of all ranks, in the order of their heads."""

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
        return [port.port for port in self._ports]

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        for port in self._ports:
            port.open(epoch, block_ids, verify=verify)
        self._open.add(epoch)

    def fence(self, epoch: bytes) -> None:
        """A second fence adds nothing while a port has not answered the first."""
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
        """After the epoch has ended blocks are dropped unread: its `SendEnded` was for them too."""
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
            one.port.write(one.part, (engine_id, one.address), pairs, verify=verify)

    def checksum(self, epoch: bytes) -> int | None:
        """Complete once the last `BlocksSent` has come."""
        sending = self._sendings.get(epoch)
        return (
            None if sending is None else combined(one.checksum for one in sending.slices.values())
        )

    def forget(self, epoch: bytes) -> None:
        """Raises ValueError while writes are unacknowledged."""
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
        """Writes already on the wire may still arrive."""
        sending = self._sendings.get(epoch)
        if sending is None:
            self._add(SendEnded(epoch, "cancelled"))
        else:
            self._end(sending, "cancelled")

    def poll(self) -> list[TransferEvent]:
        self._collect()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        for port in self._ports:
            port.close()

    def _collect(self) -> None:
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
