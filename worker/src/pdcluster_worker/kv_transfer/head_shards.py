"""Slices of KV blocks: the heads that one rank writes to one port of a peer.

Pure.  The ranks of an engine share the KV heads of each block evenly, in their
order, and each rank has a KV port of its own.  Between engines of unequal sizes
a rank writes to every port that takes some of its heads: two ranks to one port,
or one rank to two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdcluster_worker.engine.ports import Fenced, TransferRoute


class HeadShard(NamedTuple):
    """Heads of each block that one rank writes to one port under an epoch."""

    epoch: bytes
    heads: range


@dataclass(frozen=True, slots=True)
class ShardSent:
    """The peer has these heads of these source blocks.

    checksum: of the slice as far as it was sent, None when verification is off
    at, route: see `engine.ports.BlocksSent`
    """

    part: HeadShard
    block_ids: tuple[int, ...]
    checksum: int | None = field(compare=False)
    at: float = field(compare=False)
    route: TransferRoute = field(compare=False)


@dataclass(frozen=True, slots=True)
class ShardEnded:
    """No source block of the slice is read any more; see `engine.ports.SendEnded`."""

    part: HeadShard
    reason: str


ShardEvent = ShardSent | ShardEnded | Fenced
"""Event of one port.  Fenced: what it received, of the heads that it takes."""

Emit = Callable[[ShardEvent], None]


class ShardPort(Protocol):
    """One rank's end of transfers: it takes its heads at its port, and writes its heads.

    As `engine.ports.Transport`, of its heads alone; checksums come with `ShardSent`.
    """

    @property
    def heads(self) -> range:
        """That it holds and takes."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of its heads of one block."""
        ...

    @property
    def port(self) -> int:
        """TCP port that peers connect to; 0 when there is none."""
        ...

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Accept writes into its heads of these blocks.

        Once it returns, none is refused as too early.
        """
        ...

    def fence(self, epoch: bytes) -> None:
        """Close the epoch here; Fenced follows."""
        ...

    def write(
        self,
        part: HeadShard,
        engine_id: str,
        address: str,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """Queue writes of these heads, of (source block here, target block there)."""
        ...

    def forget(self, part: HeadShard) -> None:
        """Drop the record of a finished slice."""
        ...

    def cancel(self, part: HeadShard) -> None:
        """Stop sending; ShardEnded follows."""
        ...

    def poll(self) -> list[ShardEvent]:
        """Events since the last call, in order."""
        ...

    def close(self) -> None:
        """Stop all threads and sockets."""
        ...


def shares(num_heads: int, num_ports: int) -> list[range]:
    """The heads of each port.

    >>> shares(8, 2)
    [range(0, 4), range(4, 8)]

    Raises ValueError where they cannot be shared evenly.
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

    Raises ValueError where the peer's ports cannot share the heads evenly.
    """
    taken = zip(shares(num_heads, len(addresses)), addresses, strict=True)
    common = [
        (range(max(held.start, heads.start), min(held.stop, heads.stop)), address)
        for heads, address in taken
    ]
    return [(heads, address) for heads, address in common if heads]
