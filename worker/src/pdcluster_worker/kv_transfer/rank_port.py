"""The KV port of another rank of the engine, over a socket pair.

Each message is its length, 4 bytes, and its body.  Rank 0 sends Listen first, which is answered by
Listening or Refused, and waits for EpochOpened after each Open.  Events come whenever they happen.
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

import msgspec

from pdcluster_worker.engine.ports import EngineBrokenError, Fenced, KVMemory, TransferRoute
from pdcluster_worker.errors import ConfigError, WorkerError
from pdcluster_worker.kv_transfer.carriers import TransportName
from pdcluster_worker.kv_transfer.sharded import (
    EventQueue,
    HeadShard,
    ShardEnded,
    ShardEvent,
    ShardSent,
)
from pdcluster_worker.kv_transfer.tcp import TcpPort, TcpSettings

_LENGTH = struct.Struct("!I")


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Open your KV port, for this engine; see `TcpSettings`.  port: 0 = any free one."""

    engine_id: str
    host: str
    port: int
    verify: bool
    bandwidth: int
    transport: TransportName


class Open(msgspec.Struct, frozen=True, tag=True):
    """Messages of `ShardPort`, as those below."""

    epoch: bytes
    block_ids: list[int]
    verify: bool


class Fence(msgspec.Struct, frozen=True, tag=True):
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
    epoch: bytes
    first_head: int
    end_head: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
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
    """As `ShardSent`."""

    epoch: bytes
    first_head: int
    end_head: int
    block_ids: tuple[int, ...]
    checksum: int | None
    at: float
    route: TransferRoute


class ShardSendEnded(msgspec.Struct, frozen=True, tag=True):
    """As `ShardEnded`."""

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


logger = logging.getLogger(__name__)


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
        self._opened: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._send(listen)
        self.port = self._listening(listen)
        threading.Thread(target=self._read, name=f"kv-rank-{heads.start}", daemon=True).start()

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Waits until the rank has done it."""
        self._send(Open(epoch, list(block_ids), verify))
        if not self._opened.get():
            raise self._gone()

    def fence(self, epoch: bytes) -> None:
        self._send(Fence(epoch))

    def write(
        self,
        part: HeadShard,
        engine_id: str,
        address: str,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        heads = part.heads
        self._send(
            Write(part.epoch, heads.start, heads.stop, engine_id, address, list(pairs), verify)
        )

    def forget(self, part: HeadShard) -> None:
        self._send(Forget(part.epoch, part.heads.start, part.heads.stop))

    def cancel(self, part: HeadShard) -> None:
        self._send(Cancel(part.epoch, part.heads.start, part.heads.stop))

    def poll(self) -> list[ShardEvent]:
        return self._events.poll()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait
        self._channel.close()

    def _listening(self, listen: Listen) -> int:
        match receive_answer(self._channel):
            case Listening(port=port):
                return port
            case Refused(reason=reason):
                raise ConfigError(reason)
            case _:
                raise self._gone()

    def _read(self) -> None:
        """In a thread, until the line ends."""
        while (answer := receive_answer(self._channel)) is not None:
            if isinstance(answer, EpochOpened):
                self._opened.put(True)
            elif (event := _event_of(answer)) is not None:
                self._events.put(event)
        self._opened.put(False)

    def _send(self, message: Command) -> None:
        try:
            send(self._channel, message)
        except OSError as e:
            raise self._gone() from e

    def _gone(self) -> EngineBrokenError:
        return EngineBrokenError(
            f"the rank of KV heads {self.heads.start} to {self.heads.stop - 1} is gone"
        )


def _event_of(answer: RankAnswer) -> ShardEvent | None:
    match answer:
        case ShardSendDone():
            part = HeadShard(answer.epoch, range(answer.first_head, answer.end_head))
            return ShardSent(part, answer.block_ids, answer.checksum, answer.at, answer.route)
        case ShardSendEnded():
            part = HeadShard(answer.epoch, range(answer.first_head, answer.end_head))
            return ShardEnded(part, answer.reason)
        case RankFenced():
            return Fenced(answer.epoch, answer.received, answer.num_bytes, answer.checksum)
    return None


def _answer_of(event: ShardEvent) -> RankAnswer:
    match event:
        case ShardSent(part=(epoch, heads)):
            return ShardSendDone(
                *(epoch, heads.start, heads.stop),
                block_ids=event.block_ids,
                checksum=event.checksum,
                at=event.at,
                route=event.route,
            )
        case ShardEnded(part=(epoch, heads)):
            return ShardSendEnded(epoch, heads.start, heads.stop, event.reason)
        case Fenced():
            return RankFenced(event.epoch, event.received, event.num_bytes, event.checksum)


def serve_in_thread(channel: socket.socket, memory: KVMemory) -> None:
    """In a rank: open its port when rank 0 says so, and serve it until rank 0 closes the line."""
    threading.Thread(target=_serve, args=(channel, memory), name="kv-line", daemon=True).start()


def _serve(channel: socket.socket, memory: KVMemory) -> None:
    """The line is closed at the end: rank 0 then knows that this rank moves nothing more."""
    with channel:
        try:
            listen = receive_command(channel)
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
            command = receive_command(channel)
            if command is None:
                return
            _apply(command, channel, port)
        if wakeup in ready:
            os.eventfd_read(wakeup)
            for event in port.poll():
                send(channel, _answer_of(event))


def _apply(command: Command, channel: socket.socket, port: TcpPort) -> None:
    match command:
        case Open(epoch=epoch, block_ids=block_ids, verify=verify):
            port.open(epoch, block_ids, verify=verify)
            send(channel, EpochOpened())
        case Fence(epoch=epoch):
            port.fence(epoch)
        case Write():
            part = HeadShard(command.epoch, range(command.first_head, command.end_head))
            port.write(
                part, command.engine_id, command.address, command.pairs, verify=command.verify
            )
        case Forget():
            port.forget(HeadShard(command.epoch, range(command.first_head, command.end_head)))
        case Cancel():
            port.cancel(HeadShard(command.epoch, range(command.first_head, command.end_head)))
