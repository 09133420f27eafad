"""The KV port: takes frames from peers straight into blocks that `transfer.inbox` allows.

One thread listens and one serves each connection; all wait in the kernel, and
never while they hold an epoch, so a stalled peer cannot delay a fence.  A
frame that the inbox refuses is drained and answered; bytes that are not the
protocol close that connection alone.  Knows nothing of requests.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.transfer import sockets, wire
from pdcluster_worker.transfer.address import format_address
from pdcluster_worker.transfer.inbox import Inbox, Receiving

logger = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""A connection that does not introduce itself in this time is closed."""
ACK_SECONDS = 30
"""A peer that does not take its acknowledgements for this long is closed."""
MAX_CONNECTIONS = 512
"""Threads that peers can make us hold; a cell has at most about 128 workers, each with one connection."""
JOIN_SECONDS = 5.0

_ACCEPT_RETRY_SECONDS = 0.1
_SCRATCH_BYTES = 256 << 10
_BROKE_OFF = "the peer closed within a frame"

Message = TypeVar("Message", wire.Hello, wire.Header)


class TcpReceiver:
    """Listens from construction to `close`.

    num_bad_connections: connections closed because their bytes were not the protocol.
    """

    def __init__(self, inbox: Inbox, memory: KVMemory, engine_id: str, host: str, port: int) -> None:
        self._inbox = inbox
        self._memory = memory
        self._engine_id = engine_id
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self.num_bad_connections = 0
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept_all, name="kv-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, break all connections, wait for the threads: no block is written afterwards."""
        self._closing.set()
        _shut(self._listener)
        self._thread.join(JOIN_SECONDS)
        self._listener.close()
        with self._lock:
            connections = list(self._connections.items())
        for sock, _ in connections:
            _shut(sock)
        for _, thread in connections:
            thread.join(JOIN_SECONDS)

    def _accept_all(self) -> None:
        while not self._closing.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as e:
                if not self._closing.is_set():  # out of file descriptors, or the peer was gone before we looked
                    logger.warning("cannot accept a KV connection: %s", sockets.describe(e))
                    self._closing.wait(_ACCEPT_RETRY_SECONDS)
                continue
            self._start(sock, format_address(*address[:2]))

    def _start(self, sock: socket.socket, peer: str) -> None:
        thread = threading.Thread(target=self._serve, args=(sock, peer), name=f"kv-from-{peer}", daemon=True)
        with self._lock:
            is_full = len(self._connections) >= MAX_CONNECTIONS
            if not is_full:
                self._connections[sock] = thread
        if is_full:
            logger.warning("refused a KV connection peer=%s: %d are open, the limit", peer, MAX_CONNECTIONS)
            sock.close()
            return
        try:
            thread.start()
        except RuntimeError as e:  # no more threads: this connection alone fails
            logger.warning("refused a KV connection peer=%s: %s", peer, e)
            self._forget(sock)

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sockets.tune(sock)
            self._talk(sock)
        except wire.WireError as e:
            with self._lock:
                self.num_bad_connections += 1
            logger.warning("closed a KV connection peer=%s bad_connections=%d: %s", peer, self.num_bad_connections, e)
        except OSError as e:
            if not self._closing.is_set():
                logger.info("lost a KV connection peer=%s: %s", peer, sockets.describe(e))
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            del self._connections[sock]
        sock.close()

    def _talk(self, sock: socket.socket) -> None:
        sock.settimeout(HELLO_SECONDS)
        hello = _read(sock, wire.decode_hello)
        if hello is None:
            return
        refusal = None if hello.engine_id == self._engine_id else f"this is engine {self._engine_id}, not {hello.engine_id}"
        sock.sendall(wire.encode_reply(wire.Reply(refusal)))
        if refusal is not None:
            return
        sock.settimeout(None)
        sockets.limit_send_wait(sock, ACK_SECONDS)
        while (header := _read(sock, wire.decode_header)) is not None:
            refusal = self._receive(sock, header)
            sock.sendall(wire.encode_ack(wire.Ack(header.epoch, refusal)))

    def _receive(self, sock: socket.socket, header: wire.Header) -> str | None:
        """Take one frame's payload, into its blocks or nowhere; returns why not if it is refused."""
        if header.payload_bytes != len(header.block_ids) * self._memory.block_bytes:
            _drain(sock, header.payload_bytes)
            return f"a block has {self._memory.block_bytes} bytes, not {header.payload_bytes} for {len(header.block_ids)} blocks"
        receiving = self._inbox.claim(header.epoch, header.block_ids)
        if isinstance(receiving, str):
            _drain(sock, header.payload_bytes)
            return receiving
        remaining = header.payload_bytes
        for block_id in header.block_ids:
            remaining -= self._fill(sock, receiving, self._memory.block(block_id))
            if not self._inbox.complete(receiving, block_id):
                _drain(sock, remaining)
                return "dead epoch"
        return None

    def _fill(self, sock: socket.socket, receiving: Receiving, block: memoryview) -> int:
        """Read one block's bytes into it, stopping early if its epoch is fenced; returns the bytes read."""
        filled = 0
        while filled < len(block) and self._inbox.enter(receiving):
            try:
                num_bytes = sock.recv_into(block[filled:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_bytes = None
            finally:
                self._inbox.leave(receiving)
            if num_bytes is None:
                _wait_readable(sock)
            elif num_bytes == 0:
                raise ConnectionAbortedError(_BROKE_OFF)
            else:
                filled += num_bytes
        return filled


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the address cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=host == "::")
    except OSError as e:
        where = format_address(host, port)
        raise ConfigError(f"KV port {where}: {sockets.describe(e)}: choose another listen.kv, or 0 for any free port") from e


def _read(sock: socket.socket, decode: Callable[[bytes], Message | int]) -> Message | None:
    """The next message; None when the peer has closed between messages.  Raises WireError on bad or broken-off bytes."""
    data = b""
    while isinstance(message := decode(data), int):
        chunk = sock.recv(message)
        if not chunk and data:
            raise wire.WireError("the peer broke off within a message")
        if not chunk:
            return None
        data += chunk
    return message


def _wait_readable(sock: socket.socket) -> None:
    """Wait without any block in the kernel's hands: a peek needs one byte of room, and ends at data, at EOF or at a shutdown."""
    sock.recv(1, socket.MSG_PEEK)


def _drain(sock: socket.socket, num_bytes: int) -> None:
    """Read a refused payload away; its size was bounded by `wire`."""
    scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
    while num_bytes:
        received = sock.recv_into(scratch[:num_bytes])
        if received == 0:
            raise ConnectionAbortedError(_BROKE_OFF)
        num_bytes -= received


def _shut(sock: socket.socket) -> None:
    """Wake whoever waits on this socket; its own thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
