"""Messages between rank 0 and another rank of its engine about KV, over a socket pair.

Each message is its length, 4 bytes, and its body.  Rank 0 sends Listen first, which is
answered by Listening or Refused, and waits for Opened after each Open.  Events
come whenever they happen.
"""

import socket
import struct

import msgspec

from pdcluster_worker.engine.ports import Route
from pdcluster_worker.transfer.carriers import TransportName

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
    """See `kv_slice.SlicePort`, as the messages below."""

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


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The epoch of the oldest Open that was not answered is open."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """As `kv_slice.SliceSent`."""

    epoch: bytes
    first_head: int
    end_head: int
    block_ids: tuple[int, ...]
    checksum: int | None
    at: float
    route: Route


class Ended(msgspec.Struct, frozen=True, tag=True):
    """As `kv_slice.SliceEnded`."""

    epoch: bytes
    first_head: int
    end_head: int
    reason: str


class FencedHere(msgspec.Struct, frozen=True, tag=True):
    """As `engine.ports.Fenced`."""

    epoch: bytes
    received: frozenset[int]
    num_bytes: int
    checksum: int | None


Answer = Listening | Refused | Opened | Sent | Ended | FencedHere

_encode = msgspec.msgpack.Encoder().encode
_decode_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_decode_answer: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(line: socket.socket, message: Command | Answer) -> None:
    """Hand over a whole message.  Raises OSError where the other side is gone."""
    body = _encode(message)
    line.sendall(_LENGTH.pack(len(body)) + body)


def receive_command(line: socket.socket) -> Command | None:
    """The next message of rank 0; None when it has closed."""
    body = _receive(line)
    return None if body is None else _decode_command.decode(body)


def receive_answer(line: socket.socket) -> Answer | None:
    """The next message of a rank; None when it is gone."""
    body = _receive(line)
    return None if body is None else _decode_answer.decode(body)


def _receive(line: socket.socket) -> bytes | None:
    head = _exactly(line, _LENGTH.size)
    return None if head is None else _exactly(line, _LENGTH.unpack(head)[0])


def _exactly(line: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = line.recv(num_bytes - len(data))
        except OSError:  # gone, or closed here
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)
