"""The KV port of another rank of the engine, over a socket pair.

Each message is its length, 4 bytes, its kind, 1 byte, and its body.  Rank 0 sends Listen first,
which is answered by Listening or Refused, and waits for EpochOpened after each Open.  Events come
whenever they happen.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdcluster_worker.engine.ports import EngineBrokenError, Fenced, KVMemory
from pdcluster_worker.errors import ConfigError, WorkerError
from pdcluster_worker.kv_transfer.carriers import TransportName
from pdcluster_worker.kv_transfer.sharded import (
    EventQueue,
    HeadShard,
    Pairs,
    PeerAddress,
    ShardEnded,
    ShardSent,
)
from pdcluster_worker.kv_transfer.tcp import TcpPort, TcpSettings

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("!IB")


class Listen(msgspec.Struct, frozen=True):
    """Open your KV port, for this engine; see `TcpSettings`.  port: 0 = any free one."""

    engine_id: str
    host: str
    port: int
    verify: bool
    bandwidth: int
    transport: TransportName


class Open(msgspec.Struct, frozen=True):
    """A call of `ShardPort`, as those below."""

    epoch: bytes
    block_ids: list[int]
    verify: bool


class Fence(msgspec.Struct, frozen=True):
    epoch: bytes


class Write(msgspec.Struct, frozen=True):
    part: HeadShard
    peer: PeerAddress
    pairs: list[tuple[int, int]]
    verify: bool


class Forget(msgspec.Struct, frozen=True):
    part: HeadShard


class Cancel(msgspec.Struct, frozen=True):
    part: HeadShard


class Listening(msgspec.Struct, frozen=True):
    """The port is open."""

    port: int


class Refused(msgspec.Struct, frozen=True):
    """The port cannot be opened."""

    reason: str


class EpochOpened(msgspec.Struct, frozen=True):
    """The epoch of the oldest Open that was not answered is open."""


_KINDS = (
    *(Listen, Open, Fence, Write, Forget, Cancel),
    *(Listening, Refused, EpochOpened, ShardSent, ShardEnded, Fenced),
)
_encode = msgspec.msgpack.Encoder(enc_hook=lambda heads: (heads.start, heads.stop)).encode
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(kind, dec_hook=lambda _, ends: range(*ends)) for kind in _KINDS
]


def send(channel: socket.socket, message: object) -> None:
    """Hand over a whole message.  Raises OSError where the other side is gone."""
    body = _encode(message)
    channel.sendall(_HEAD.pack(len(body), _KINDS.index(type(message))) + body)


def receive(channel: socket.socket) -> Any:
    """The next message; None when the other side has closed, or is gone."""
    head = _exactly(channel, _HEAD.size)
    if head is None:
        return None
    num_bytes, kind = _HEAD.unpack(head)
    body = _exactly(channel, num_bytes)
    return None if body is None else _DECODERS[kind].decode(body)


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


class RankPort:
    """Raises ConfigError if its port cannot be bound, EngineBrokenError if the rank is gone."""

    def __init__(
        self,
        channel: socket.socket,
        heads: range,
        block_bytes: int,
        wake: Callable[[], None],
        listen: Listen,
    ) -> None:
        """heads: of the rank; block_bytes: of these heads of one block."""
        self.heads = heads
        self.block_bytes = block_bytes
        self._channel = channel
        self._events = EventQueue(wake)
        self.poll = self._events.poll
        self._opened: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._send(listen)
        self.port = self._listening()
        threading.Thread(target=self._read, name=f"kv-rank-{heads.start}", daemon=True).start()

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Waits until the rank has done it."""
        self._send(Open(epoch, list(block_ids), verify))
        if not self._opened.get():
            raise self._gone()

    def fence(self, epoch: bytes) -> None:
        self._send(Fence(epoch))

    def write(
        self, part: HeadShard, peer: PeerAddress, pairs: Pairs, *, verify: bool = False
    ) -> None:
        self._send(Write(part, peer, list(pairs), verify))

    def forget(self, part: HeadShard) -> None:
        self._send(Forget(part))

    def cancel(self, part: HeadShard) -> None:
        self._send(Cancel(part))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait
        self._channel.close()

    def _listening(self) -> int:
        match receive(self._channel):
            case Listening(port=port):
                return port
            case Refused(reason=reason):
                raise ConfigError(reason)
            case _:
                raise self._gone()

    def _read(self) -> None:
        """In a thread, until the line ends."""
        while (answer := receive(self._channel)) is not None:
            if isinstance(answer, EpochOpened):
                self._opened.put(True)
            else:
                self._events.put(answer)
        self._opened.put(False)

    def _send(self, message: object) -> None:
        try:
            send(self._channel, message)
        except OSError as e:
            raise self._gone() from e

    def _gone(self) -> EngineBrokenError:
        return EngineBrokenError(
            f"the rank of KV heads {self.heads.start} to {self.heads.stop - 1} is gone"
        )


def serve_in_thread(channel: socket.socket, memory: KVMemory) -> None:
    """In a rank: open its port when rank 0 says so, and serve it until rank 0 closes the line."""
    threading.Thread(target=_serve, args=(channel, memory), name="kv-line", daemon=True).start()


def _serve(channel: socket.socket, memory: KVMemory) -> None:
    """The line is closed at the end: rank 0 then knows that this rank moves nothing more."""
    with channel:
        try:
            listen = receive(channel)
            if isinstance(listen, Listen):
                _listen(channel, listen, memory)
        except OSError:  # rank 0 is gone
            pass
        except Exception:
            logger.exception("the KV port of this rank failed")


def _listen(channel: socket.socket, listen: Listen, memory: KVMemory) -> None:
    wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    settings = TcpSettings(
        verify=listen.verify, bandwidth=listen.bandwidth, transport=listen.transport
    )
    address = listen.host, listen.port
    try:
        port = TcpPort(
            memory, listen.engine_id, address, lambda: os.eventfd_write(wakeup, 1), settings
        )
    except WorkerError as e:
        send(channel, Refused(str(e)))
        return
    try:
        send(channel, Listening(port.port))
        _pump(channel, wakeup, port)
    finally:
        port.close()  # the bell stays open: a thread that is late may still ring it


def _pump(channel: socket.socket, wakeup: int, port: TcpPort) -> None:
    """Commands to the port, its events to rank 0; until rank 0 closes the line."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if channel.fileno() in ready:
            command = receive(channel)
            if command is None:
                return
            _apply(command, channel, port)
        if wakeup in ready:
            os.eventfd_read(wakeup)
            for event in port.poll():
                send(channel, event)


def _apply(command: object, channel: socket.socket, port: TcpPort) -> None:
    match command:
        case Open(epoch=epoch, block_ids=block_ids, verify=verify):
            port.open(epoch, block_ids, verify=verify)
            send(channel, EpochOpened())
        case Fence(epoch=epoch):
            port.fence(epoch)
        case Write(part=part, peer=peer, pairs=pairs, verify=verify):
            port.write(part, peer, pairs, verify=verify)
        case Forget(part=part):
            port.forget(part)
        case Cancel(part=part):
            port.cancel(part)
