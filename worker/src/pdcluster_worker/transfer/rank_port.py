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

from pdcluster_worker.engine.execution import EngineBrokenError
from pdcluster_worker.engine.ports import Fenced, KVMemory
from pdcluster_worker.errors import ConfigError, WorkerError
from pdcluster_worker.transfer import rank_line
from pdcluster_worker.transfer.events import EventQueue
from pdcluster_worker.transfer.kv_slice import KVSlice, SliceEnded, SliceEvent, SliceSent
from pdcluster_worker.transfer.tcp_port import TcpPort, TcpSettings

logger = logging.getLogger(__name__)


class RankPort:
    """`kv_slice.SlicePort` of another rank, whose line this is.

    Raises ConfigError where its port cannot be bound, EngineBrokenError where it is gone.
    """

    def __init__(
        self,
        line: socket.socket,
        heads: range,
        block_bytes: int,
        wake: Callable[[], None],
        listen: rank_line.Listen,
    ) -> None:
        """heads: of the rank; block_bytes: of these heads of one block."""
        self.heads = heads
        self.block_bytes = block_bytes
        self._line = line
        self._events = EventQueue(wake)
        self._opened: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._send(listen)
        self.port = self._listening(listen)
        threading.Thread(target=self._read, name=f"kv-rank-{heads.start}", daemon=True).start()

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """See kv_slice.SlicePort; waits until the rank has done it."""
        self._send(rank_line.Open(epoch, list(block_ids), verify))
        if not self._opened.get():
            raise self._gone()

    def fence(self, epoch: bytes) -> None:
        """See kv_slice.SlicePort."""
        self._send(rank_line.Fence(epoch))

    def write(
        self,
        part: KVSlice,
        engine_id: str,
        address: str,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """See kv_slice.SlicePort."""
        heads = part.heads
        self._send(
            rank_line.Write(
                part.epoch, heads.start, heads.stop, engine_id, address, list(pairs), verify
            )
        )

    def forget(self, part: KVSlice) -> None:
        """See kv_slice.SlicePort."""
        self._send(rank_line.Forget(part.epoch, part.heads.start, part.heads.stop))

    def cancel(self, part: KVSlice) -> None:
        """See kv_slice.SlicePort."""
        self._send(rank_line.Cancel(part.epoch, part.heads.start, part.heads.stop))

    def poll(self) -> list[SliceEvent]:
        """See kv_slice.SlicePort."""
        return self._events.poll()

    def close(self) -> None:
        """Close the line, with which the rank closes its port."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait
        self._line.close()

    def _listening(self, listen: rank_line.Listen) -> int:
        match rank_line.receive_answer(self._line):
            case rank_line.Listening(port=port):
                return port
            case rank_line.Refused(reason=reason):
                raise ConfigError(reason)
            case _:
                raise self._gone()

    def _read(self) -> None:
        """In a thread, until the line ends."""
        while (answer := rank_line.receive_answer(self._line)) is not None:
            if isinstance(answer, rank_line.Opened):
                self._opened.put(True)
            elif (event := _event_of(answer)) is not None:
                self._events.put(event)
        self._opened.put(False)

    def _send(self, message: rank_line.Command) -> None:
        try:
            rank_line.send(self._line, message)
        except OSError as e:
            raise self._gone() from e

    def _gone(self) -> EngineBrokenError:
        return EngineBrokenError(
            f"the rank of KV heads {self.heads.start} to {self.heads.stop - 1} is gone"
        )


def _event_of(answer: rank_line.Answer) -> SliceEvent | None:
    match answer:
        case rank_line.Sent():
            part = KVSlice(answer.epoch, range(answer.first_head, answer.end_head))
            return SliceSent(part, answer.block_ids, answer.checksum, answer.at, answer.route)
        case rank_line.Ended():
            part = KVSlice(answer.epoch, range(answer.first_head, answer.end_head))
            return SliceEnded(part, answer.reason)
        case rank_line.FencedHere():
            return Fenced(answer.epoch, answer.received, answer.num_bytes, answer.checksum)
    return None


def _answer_of(event: SliceEvent) -> rank_line.Answer:
    match event:
        case SliceSent(part=(epoch, heads)):
            return rank_line.Sent(
                *(epoch, heads.start, heads.stop),
                block_ids=event.block_ids,
                checksum=event.checksum,
                at=event.at,
                route=event.route,
            )
        case SliceEnded(part=(epoch, heads)):
            return rank_line.Ended(epoch, heads.start, heads.stop, event.reason)
        case Fenced():
            return rank_line.FencedHere(
                event.epoch, event.received, event.num_bytes, event.checksum
            )


def serve_in_thread(line: socket.socket, memory: KVMemory) -> None:
    """In a rank: open its port when rank 0 says so, and serve it until rank 0 closes the line."""
    threading.Thread(target=_serve, args=(line, memory), name="kv-line", daemon=True).start()


def _serve(line: socket.socket, memory: KVMemory) -> None:
    """The line is closed at the end: rank 0 then knows that this rank moves nothing more."""
    with line:
        try:
            listen = rank_line.receive_command(line)
            if isinstance(listen, rank_line.Listen):
                _listen(line, listen, memory)
        except OSError:  # rank 0 is gone
            pass
        except Exception:
            logger.exception("the KV port of this rank failed")


def _listen(line: socket.socket, listen: rank_line.Listen, memory: KVMemory) -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    settings = TcpSettings(
        verify=listen.verify, bandwidth=listen.bandwidth, transport=listen.transport
    )
    address = listen.host, listen.port
    try:
        port = TcpPort(
            memory, listen.engine_id, address, lambda: os.eventfd_write(bell, 1), settings
        )
    except WorkerError as e:
        rank_line.send(line, rank_line.Refused(str(e)))
        return
    try:
        rank_line.send(line, rank_line.Listening(port.port))
        _pump(line, bell, port)
    finally:
        port.close()  # the bell stays open: a thread that is late may still ring it


def _pump(line: socket.socket, bell: int, port: TcpPort) -> None:
    """Commands to the port, its events to rank 0; until rank 0 closes the line."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    poll.register(bell, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if line.fileno() in ready:
            command = rank_line.receive_command(line)
            if command is None:
                return
            _apply(command, line, port)
        if bell in ready:
            os.eventfd_read(bell)
            for event in port.poll():
                rank_line.send(line, _answer_of(event))


def _apply(command: rank_line.Command, line: socket.socket, port: TcpPort) -> None:
    match command:
        case rank_line.Open(epoch=epoch, block_ids=block_ids, verify=verify):
            port.open(epoch, block_ids, verify=verify)
            rank_line.send(line, rank_line.Opened())
        case rank_line.Fence(epoch=epoch):
            port.fence(epoch)
        case rank_line.Write():
            part = KVSlice(command.epoch, range(command.first_head, command.end_head))
            port.write(
                part, command.engine_id, command.address, command.pairs, verify=command.verify
            )
        case rank_line.Forget():
            port.forget(KVSlice(command.epoch, range(command.first_head, command.end_head)))
        case rank_line.Cancel():
            port.cancel(KVSlice(command.epoch, range(command.first_head, command.end_head)))
