"""Messages between rank 0 and another rank of its engine about KV, over a socket pair.

Each message is its length, 4 bytes, and its body.  Rank 0 sends Listen first, which is
answered by Listening or Refused, and waits for Opened after each Open.  Events
come whenever they happen.
"""

import socket
import struct

import msgspec

from pdcluster_worker.engine.ports import TransferRoute
from pdcluster_worker.kv_transfer.carriers import TransportName

_LENGTH = struct.Struct("!I")


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Open your KV port, for this engine; see `tcp_port.TcpSettings`.  port: 0 = any free one."""

    engine_id: str
    host: str
    port: int
    verify: bool
    bandwidth: int
    transport: TransportName


class Open(msgspec.Struct, frozen=True, tag=True):
    """See `head_shards.ShardPort`, as the messages below."""

    epoch: bytes
    block_ids: list[int]
    verify: bool


class Fence(msgspec.Struct, frozen=True, tag=True):
    """Close an epoch."""

    epoch: bytes


class Write(msgspec.Struct, frozen=True, tag=True):
    """Queue writes of heads from `first_head` to before `end_head`."""

    epoch: bytes
    first_head: int
    end_head: int
    engine_id: str
    address: str
    pairs: list[tuple[int, int]]
    verify: bool


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop a finished slice."""

    epoch: bytes
    first_head: int
    end_head: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop sending a slice."""

    epoch: bytes
    first_head: int
    end_head: int


Command = Listen | Open | Fence | Write | Forget | Cancel


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The port is open."""

    port: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The port cannot be opened."""

    reason: str


class EpochOpened(msgspec.Struct, frozen=True, tag=True):
    """The epoch of the oldest Open that was not answered is open."""


class ShardSendDone(msgspec.Struct, frozen=True, tag=True):
    """As `head_shards.ShardSent`."""

    epoch: bytes
    first_head: int
    end_head: int
    block_ids: tuple[int, ...]
    checksum: int | None
    at: float
    route: TransferRoute


class ShardSendEnded(msgspec.Struct, frozen=True, tag=True):
    """As `head_shards.ShardEnded`."""

    epoch: bytes
    first_head: int
    end_head: int
    reason: str


class RankFenced(msgspec.Struct, frozen=True, tag=True):
    """As `engine.ports.Fenced`."""

    epoch: bytes
    received: frozenset[int]
    num_bytes: int
    checksum: int | None


RankAnswer = Listening | Refused | EpochOpened | ShardSendDone | ShardSendEnded | RankFenced

_encode = msgspec.msgpack.Encoder().encode
_decode_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_decode_answer: msgspec.msgpack.Decoder[RankAnswer] = msgspec.msgpack.Decoder(RankAnswer)


def send(channel: socket.socket, message: Command | RankAnswer) -> None:
    """Hand over a whole message.  Raises OSError where the other side is gone."""
    body = _encode(message)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive_command(channel: socket.socket) -> Command | None:
    """The next message of rank 0; None when it has closed."""
    body = _receive(channel)
    return None if body is None else _decode_command.decode(body)


def receive_answer(channel: socket.socket) -> RankAnswer | None:
    """The next message of a rank; None when it is gone."""
    body = _receive(channel)
    return None if body is None else _decode_answer.decode(body)


def _receive(channel: socket.socket) -> bytes | None:
    head = _exactly(channel, _LENGTH.size)
    return None if head is None else _exactly(channel, _LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = channel.recv(num_bytes - len(data))
        except OSError:  # gone, or closed here
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)
