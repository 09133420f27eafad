"""The KV port of another rank of this engine: `RankPort` in rank 0, `serve_in_thread` in the rank.

Rank 0's engine loop decides what is written and fenced; the rank's own threads
move the bytes, between its memory and the peer.  A rank that is gone answers no
fence, so no block that it might still write is used again; its engine ends.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence

from pdcluster_worker.engine.ports import EngineBrokenError, Fenced, KVMemory
from pdcluster_worker.errors import ConfigError, WorkerError
from pdcluster_worker.kv_transfer import rank_ipc
from pdcluster_worker.kv_transfer.events import EventQueue
from pdcluster_worker.kv_transfer.head_shards import HeadShard, ShardEnded, ShardEvent, ShardSent
from pdcluster_worker.kv_transfer.tcp_port import TcpPort, TcpSettings

logger = logging.getLogger(__name__)


class RankPort:
    """`head_shards.ShardPort` of another rank, whose line this is.

    Raises ConfigError where its port cannot be bound, EngineBrokenError where it is gone.
    """

    def __init__(
        self,
        channel: socket.socket,
        heads: range,
        block_bytes: int,
        wake: Callable[[], None],
        listen: rank_ipc.Listen,
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
        """See head_shards.ShardPort; waits until the rank has done it."""
        self._send(rank_ipc.Open(epoch, list(block_ids), verify))
        if not self._opened.get():
            raise self._gone()

    def fence(self, epoch: bytes) -> None:
        """See head_shards.ShardPort."""
        self._send(rank_ipc.Fence(epoch))

    def write(
        self,
        part: HeadShard,
        engine_id: str,
        address: str,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """See head_shards.ShardPort."""
        heads = part.heads
        self._send(
            rank_ipc.Write(
                part.epoch, heads.start, heads.stop, engine_id, address, list(pairs), verify
            )
        )

    def forget(self, part: HeadShard) -> None:
        """See head_shards.ShardPort."""
        self._send(rank_ipc.Forget(part.epoch, part.heads.start, part.heads.stop))

    def cancel(self, part: HeadShard) -> None:
        """See head_shards.ShardPort."""
        self._send(rank_ipc.Cancel(part.epoch, part.heads.start, part.heads.stop))

    def poll(self) -> list[ShardEvent]:
        """See head_shards.ShardPort."""
        return self._events.poll()

    def close(self) -> None:
        """Close the line, with which the rank closes its port."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait
        self._channel.close()

    def _listening(self, listen: rank_ipc.Listen) -> int:
        match rank_ipc.receive_answer(self._channel):
            case rank_ipc.Listening(port=port):
                return port
            case rank_ipc.Refused(reason=reason):
                raise ConfigError(reason)
            case _:
                raise self._gone()

    def _read(self) -> None:
        """In a thread, until the line ends."""
        while (answer := rank_ipc.receive_answer(self._channel)) is not None:
            if isinstance(answer, rank_ipc.EpochOpened):
                self._opened.put(True)
            elif (event := _event_of(answer)) is not None:
                self._events.put(event)
        self._opened.put(False)

    def _send(self, message: rank_ipc.Command) -> None:
        try:
            rank_ipc.send(self._channel, message)
        except OSError as e:
            raise self._gone() from e

    def _gone(self) -> EngineBrokenError:
        return EngineBrokenError(
            f"the rank of KV heads {self.heads.start} to {self.heads.stop - 1} is gone"
        )


def _event_of(answer: rank_ipc.RankAnswer) -> ShardEvent | None:
    match answer:
        case rank_ipc.ShardSendDone():
            part = HeadShard(answer.epoch, range(answer.first_head, answer.end_head))
            return ShardSent(part, answer.block_ids, answer.checksum, answer.at, answer.route)
        case rank_ipc.ShardSendEnded():
            part = HeadShard(answer.epoch, range(answer.first_head, answer.end_head))
            return ShardEnded(part, answer.reason)
        case rank_ipc.RankFenced():
            return Fenced(answer.epoch, answer.received, answer.num_bytes, answer.checksum)
    return None


def _answer_of(event: ShardEvent) -> rank_ipc.RankAnswer:
    match event:
        case ShardSent(part=(epoch, heads)):
            return rank_ipc.ShardSendDone(
                *(epoch, heads.start, heads.stop),
                block_ids=event.block_ids,
                checksum=event.checksum,
                at=event.at,
                route=event.route,
            )
        case ShardEnded(part=(epoch, heads)):
            return rank_ipc.ShardSendEnded(epoch, heads.start, heads.stop, event.reason)
        case Fenced():
            return rank_ipc.RankFenced(event.epoch, event.received, event.num_bytes, event.checksum)


def serve_in_thread(channel: socket.socket, memory: KVMemory) -> None:
    """In a rank: open its port when rank 0 says so, and serve it until rank 0 closes the line."""
    threading.Thread(target=_serve, args=(channel, memory), name="kv-line", daemon=True).start()


def _serve(channel: socket.socket, memory: KVMemory) -> None:
    """The line is closed at the end: rank 0 then knows that this rank moves nothing more."""
    with channel:
        try:
            listen = rank_ipc.receive_command(channel)
            if isinstance(listen, rank_ipc.Listen):
                _listen(channel, listen, memory)
        except OSError:  # rank 0 is gone
            pass
        except Exception:
            logger.exception("the KV port of this rank failed")


def _listen(channel: socket.socket, listen: rank_ipc.Listen, memory: KVMemory) -> None:
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
        rank_ipc.send(channel, rank_ipc.Refused(str(e)))
        return
    try:
        rank_ipc.send(channel, rank_ipc.Listening(port.port))
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
            command = rank_ipc.receive_command(channel)
            if command is None:
                return
            _apply(command, channel, port)
        if wakeup in ready:
            os.eventfd_read(wakeup)
            for event in port.poll():
                rank_ipc.send(channel, _answer_of(event))


def _apply(command: rank_ipc.Command, channel: socket.socket, port: TcpPort) -> None:
    match command:
        case rank_ipc.Open(epoch=epoch, block_ids=block_ids, verify=verify):
            port.open(epoch, block_ids, verify=verify)
            rank_ipc.send(channel, rank_ipc.EpochOpened())
        case rank_ipc.Fence(epoch=epoch):
            port.fence(epoch)
        case rank_ipc.Write():
            part = HeadShard(command.epoch, range(command.first_head, command.end_head))
            port.write(
                part, command.engine_id, command.address, command.pairs, verify=command.verify
            )
        case rank_ipc.Forget():
            port.forget(HeadShard(command.epoch, range(command.first_head, command.end_head)))
        case rank_ipc.Cancel():
            port.cancel(HeadShard(command.epoch, range(command.first_head, command.end_head)))
