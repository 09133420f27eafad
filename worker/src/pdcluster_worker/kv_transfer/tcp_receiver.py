"""The KV port: listens, and gives each connection a thread, within its limits."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from pdcluster_schema.ports import join_address
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.kv_transfer import sockets, wire
from pdcluster_worker.kv_transfer.carrier import CarrierError
from pdcluster_worker.kv_transfer.tcp_inbound import Inbound, PortLimits, ReceivingEnd
from pdcluster_worker.system.process import fitting

logger = logging.getLogger(__name__)

ConnectionT = TypeVar("ConnectionT")

JOIN_SECONDS = 5.0

_ACCEPT_RETRY_SECONDS = 0.1
_QUIET_SECONDS = 1.0  # between two lines in the log about refused connections


class ConnectionLimiter(Generic[ConnectionT]):
    """Counts open connections.  close: ends one that was replaced."""

    def __init__(self, limits: PortLimits, close: Callable[[ConnectionT], None]) -> None:
        self._limits = limits
        self._close = close
        self._unauthenticated: dict[ConnectionT, str] = {}  # the longest silent one first
        self._peers: dict[ConnectionT, str] = {}
        self._unauthenticated_of: Counter[str] = Counter()
        self._peers_of: Counter[str] = Counter()

    def take(self, connection: ConnectionT, address: str) -> str | None:
        """Give a new connection of this address its place, or say why there is none."""
        limits = self._limits
        if self._unauthenticated_of[address] >= limits.max_unauthenticated_per_address:
            return (
                f"{limits.max_unauthenticated_per_address} without a hello are open from its "
                "address, the limit of one"
            )
        if len(self._unauthenticated) >= limits.max_unauthenticated:
            longest = next(iter(self._unauthenticated))
            self.leave(longest)
            self._close(longest)
        self._unauthenticated[connection] = address
        self._unauthenticated_of[address] += 1
        return None

    def authenticate(self, connection: ConnectionT) -> str | None:
        """Its hello was right: give it a peer's place, or say why there is none."""
        limits, address = self._limits, self._unauthenticated.get(connection)
        if address is None:
            return "its place was given to a new connection"
        if len(self._peers) >= limits.max_connections:
            return f"{limits.max_connections} are open, the limit"
        if self._peers_of[address] >= limits.max_per_address:
            return f"{limits.max_per_address} are open from its address, the limit of one"
        self.leave(connection)
        self._peers[connection] = address
        self._peers_of[address] += 1
        return None

    def leave(self, connection: ConnectionT) -> None:
        for entries, by_address in (
            (self._unauthenticated, self._unauthenticated_of),
            (self._peers, self._peers_of),
        ):
            if (address := entries.pop(connection, None)) is not None:
                by_address[address] -= 1
                if not by_address[address]:
                    del by_address[address]


class TcpReceiver:
    """Listens from construction to `close`."""

    def __init__(self, end: ReceivingEnd, address: tuple[str, int]) -> None:
        limits = end.limits
        limits = limits.within(fitting(limits.max_connections + limits.max_unauthenticated))
        self._end = replace(end, limits=limits)
        self._lock = threading.Lock()
        self._limiter = ConnectionLimiter[socket.socket](limits, _shut)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._spoke_at = 0.0
        self._num_refused = 0
        self.num_bad_connections = 0  # connections closed because their bytes were not the protocol
        self._listener = _listen(*address)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept_all, name="kv-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and join all threads: no block is written afterwards."""
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
                # out of file descriptors, or the peer was gone before we looked
                if not self._closing.is_set():
                    logger.warning("cannot accept a KV connection: %s", sockets.describe(e))
                    self._closing.wait(_ACCEPT_RETRY_SECONDS)
                continue
            self._start(sock, address[:2])

    def _start(self, sock: socket.socket, address: tuple[str, int]) -> None:
        peer = join_address(*address)
        name = f"kv-from-{peer}"
        thread = threading.Thread(target=self._serve, args=(sock, address), name=name, daemon=True)
        with self._lock:
            objection = self._limiter.take(sock, address[0])
            if objection is None:
                self._connections[sock] = thread
        if objection is not None:
            sock.close()
            self._log_refused(peer, objection)
            return
        try:
            thread.start()
        except RuntimeError as e:  # no more threads: this connection alone fails
            logger.warning("refused a KV connection peer=%s: %s", peer, e)
            self._forget(sock)

    def _log_refused(self, peer: str, objection: str) -> None:
        """Log it, but not each of thousands."""
        with self._lock:
            self._num_refused += 1
            count, now = self._num_refused, time.monotonic()
            speaks = now - self._spoke_at >= _QUIET_SECONDS
            if speaks:
                self._spoke_at = now
        if speaks:
            logger.warning("refused a KV connection peer=%s refused=%d: %s", peer, count, objection)

    def _serve(self, sock: socket.socket, address: tuple[str, int]) -> None:
        peer = join_address(*address)
        try:
            inbound = Inbound(sock, self._end, self._closing.is_set)
            inbound.serve(lambda: self._authenticate(sock))
        except wire.WireError as e:
            with self._lock:
                self.num_bad_connections += 1
            logger.warning(
                "closed a KV connection peer=%s bad_connections=%d: %s",
                peer,
                self.num_bad_connections,
                e,
            )
        except ConnectionRefusedError as e:  # ours, after a hello
            self._log_refused(peer, str(e))
        except (OSError, CarrierError) as e:
            if not self._closing.is_set():
                logger.info("lost a KV connection peer=%s: %s", peer, sockets.describe(e))
        finally:
            self._forget(sock)

    def _authenticate(self, sock: socket.socket) -> str | None:
        with self._lock:
            return self._limiter.authenticate(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            del self._connections[sock]
            self._limiter.leave(sock)
        sock.close()


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the address cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(
            address[:2], family=family, backlog=128, dualstack_ipv6=host == "::"
        )
    except OSError as e:
        where = join_address(host, port)
        raise ConfigError(
            f"KV port {where}: {sockets.describe(e)}: choose another listen.kv, or 0 for any free "
            "port"
        ) from e


def _shut(sock: socket.socket) -> None:
    """Wake the thread that waits on this socket; the thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
