"""One connection to one peer: connect, introduce, send frames, read their acknowledgements."""

import contextlib
import errno
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pdcluster_schema.ports import parse_address
from pdcluster_worker.engine.ports import KVMemory, TransferRoute
from pdcluster_worker.errors import PeerError
from pdcluster_worker.kv_transfer import sockets, wire
from pdcluster_worker.kv_transfer.carriers import TCP, Carriers, CarrierSender
from pdcluster_worker.kv_transfer.outbox import Frame, Outbox
from pdcluster_worker.kv_transfer.sharded import PeerAddress, head_crcs

WINDOW_FRAMES = 8
"""Frames that may be sent and not acknowledged: covers a round trip, bounds what a failure ends."""

BURST_SECONDS = 0.01
"""Unused allowance that is kept: enough to make good for the kernel's millisecond timers."""

Message = TypeVar("Message")


class TokenBucket:
    """Caps the bytes a second that all sender threads send together; 0 = no cap."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay(self, now: float) -> float:
        """Seconds until the next frame may start; 0.0 = now."""
        with self._lock:
            return max(0.0, self._free_at - now) if self._rate else 0.0

    def spend(self, num_bytes: int, now: float) -> None:
        if self._rate:
            with self._lock:
                self._free_at = max(self._free_at, now - BURST_SECONDS) + num_bytes / self._rate


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Settings that all links of an engine share."""

    bucket: TokenBucket
    frame_blocks: int  # most blocks of one frame
    carriers: Carriers
    connect_seconds: float = 5.0  # to be connected and accepted
    # Without a byte taken or a frame acknowledged while some are in flight.
    stall_seconds: float = 30.0
    # Since the last byte was sent, after which a connection is written on no more. Half of what a
    # KV port allows (`tcp_inbound.PortLimits`): it has never closed a connection that we
    # still write on, so closing idle ones costs no transfer.
    idle_seconds: float = 30.0
    clock: Callable[[], float] = time.monotonic  # monotonic seconds


class Stopped(Exception):  # noqa: N818 - a request, not an error
    """`stop` was called."""


class Link:
    """Serves one peer's part of the outbox; `wake` and `stop` from any thread."""

    def __init__(
        self, peer: PeerAddress, outbox: Outbox, memory: KVMemory, settings: LinkSettings
    ) -> None:
        self.peer = peer
        self._outbox = outbox
        self._memory = memory
        self._settings = settings
        self._waiter, self._waker = socket.socketpair()
        self._waiter.setblocking(False)
        self._waker.setblocking(False)
        self._is_stopping = False
        self._inbound = b""
        self._frame: Frame | None = None
        self._route = TCP
        self._views: list[memoryview] = []
        self._unacked: deque[tuple[Frame, TransferRoute]] = deque()
        self._num_acked = 0
        self._clock = settings.clock
        self._placing = CarrierSender(peer, settings.carriers, settings.clock)
        self._progress_at = 0.0
        self._sent_at = 0.0

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            self._waker.send(b"\0")

    def stop(self) -> None:
        self._is_stopping = True
        self.wake()

    def run(self) -> None:
        """Serve until the connection is idle for idle_seconds, or the peer closed an idle one.

        Raises OSError, WireError, ValueError (address), Stopped; no source is read afterwards.
        """
        try:
            self._num_acked = 0
            with self._connect() as sock:
                self._handshake(sock)
                self._pump(sock)
        except (OSError, PeerError) as e:
            self._placing.broke(sockets.describe(e))
            raise
        finally:
            self._abandon()

    def close(self) -> None:
        self._waiter.close()
        self._waker.close()

    def _connect(self) -> socket.socket:
        deadline = self._clock() + self._settings.connect_seconds
        failure: Exception | None = None
        try:
            for family, kind, proto, _, address in socket.getaddrinfo(
                *parse_address(self.peer[1]), type=socket.SOCK_STREAM
            ):
                with contextlib.ExitStack() as on_failure:
                    sock = on_failure.enter_context(socket.socket(family, kind, proto))
                    try:
                        self._open(sock, address, deadline)
                    except OSError as e:
                        failure = e
                        continue
                    on_failure.pop_all()
                    return sock
        except OSError as e:  # the name does not resolve
            failure = e
        reason = sockets.describe(failure) if failure else "no address"
        raise ConnectionError(f"cannot connect to {self.peer[1]}: {reason}") from failure

    def _open(self, sock: socket.socket, address: tuple[object, ...], deadline: float) -> None:
        sock.setblocking(False)
        sockets.tune(sock)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._await(sock, select.POLLOUT, deadline)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _handshake(self, sock: socket.socket) -> None:
        offers = self._placing.offers
        hello = wire.encode_hello(wire.KvHello(self.peer[0], offers))
        reply = self._call(sock, hello, wire.decode_reply)
        if reply.refusal is not None:
            raise wire.WireError(f"refused: {reply.refusal}")
        self._placing.agree(offers, reply.carrier)

    def _call(
        self, sock: socket.socket, question: bytes, decode: Callable[[bytes], Message | int]
    ) -> Message:
        deadline = self._clock() + self._settings.connect_seconds
        self._sent_at = self._clock()
        while question:
            try:
                question = question[sock.send(question) :]
            except BlockingIOError:
                self._await(sock, select.POLLOUT, deadline)
        while (answer := self._next(sock, decode)) is None:
            self._await(sock, select.POLLIN, deadline)
        return answer

    def _pump(self, sock: socket.socket) -> None:
        while True:
            try:
                self._read_acks(sock)
            except ConnectionError:
                if self._has_idled or (self._num_acked and not self._is_busy):
                    return  # nothing is lost: the next write connects again
                raise
            if self._has_idled:
                return  # the peer may be about to close it: the next write connects again
            pause = self._send(sock)  # after the acknowledgements, which open the window
            if self._is_busy and self._clock() >= self._progress_at + self._settings.stall_seconds:
                raise TimeoutError(f"stalled: no progress for {self._settings.stall_seconds:g} s")
            events = select.POLLIN | (select.POLLOUT if self._frame is not None else 0)
            self._wait(sock, events, self._deadline(pause))

    def _send(self, sock: socket.socket) -> float:
        """Send until socket, window or outbox stop it; returns seconds to wait for bandwidth."""
        while self._frame is not None or len(self._unacked) < WINDOW_FRAMES:
            if self._frame is None:
                pause = self._settings.bucket.delay(self._clock())
                if pause or not self._take(sock):
                    return pause
            if not self._push(sock):
                break
        return 0.0

    def _take(self, sock: socket.socket) -> bool:
        epoch = self._outbox.next_epoch(self.peer)
        if self._placing.is_enabled and not self._unacked and epoch is not None:
            self._placing.attach(epoch, partial(self._call, sock))
        frame = self._outbox.take(self.peer, self._settings.frame_blocks)
        if frame is None:
            return False
        self._frame = frame
        epoch, heads = frame.send.part
        block_bytes = len(heads) * self._memory.head_bytes
        num_bytes = len(frame.sources) * block_bytes
        place = self._placing.place(frame.sources, heads, block_bytes)
        header = wire.encode_header(wire.Header(epoch, heads, frame.targets, num_bytes, place))
        self._views = [memoryview(header)]
        if place is None:
            self._views += [self._memory.block(source, heads) for source in frame.sources]
        self._route = self._placing.route(place)
        self._progress_at = self._clock()
        self._settings.bucket.spend(num_bytes, self._progress_at)
        return True

    def _push(self, sock: socket.socket) -> bool:
        """Hand bytes of the frame to the kernel; False when it has no room."""
        try:
            num_bytes = sock.sendmsg(self._views)
        except BlockingIOError:
            return False
        self._progress_at = self._sent_at = self._clock()
        self._views = _skip(self._views, num_bytes)
        if not self._views and self._frame is not None:
            frame, heads = self._frame, self._frame.send.part.heads
            summed_up = frame.sources if frame.send.verify else ()
            # While it is `_frame`: where a read fails, `_abandon` releases it.
            crcs = [head_crcs(self._memory.block(each, heads), len(heads)) for each in summed_up]
            self._unacked.append((frame, self._route))
            self._frame = None
            self._outbox.release(frame, crcs)
        return True

    def _read_acks(self, sock: socket.socket) -> None:
        while (ack := self._next(sock, wire.decode_ack)) is not None:
            if not self._unacked or self._unacked[0][0].send.part.epoch != ack.epoch:
                raise wire.WireError("the peer acknowledged a frame that was not sent")
            frame, route = self._unacked.popleft()
            self._progress_at = self._clock()
            self._num_acked += 1
            self._placing.answered()
            if ack.refusal is None:
                self._outbox.acknowledge(frame, route)
            else:
                self._outbox.refuse(frame, ack.refusal)

    def _next(
        self, sock: socket.socket, decode: Callable[[bytes], Message | int]
    ) -> Message | None:
        """The next message; None if not whole yet.  Raises ConnectionError at the end."""
        while isinstance(message := decode(self._inbound), int):
            try:
                chunk = sock.recv(message)
            except BlockingIOError:
                return None
            if not chunk:
                raise ConnectionResetError("connection closed by peer")
            self._inbound += chunk
        self._inbound = b""
        return message

    def _deadline(self, pause: float) -> float:
        deadline = self._sent_at + self._settings.idle_seconds
        if self._is_busy:
            deadline = self._progress_at + self._settings.stall_seconds
        return min(deadline, self._clock() + pause) if pause else deadline

    @property
    def _is_busy(self) -> bool:
        return self._frame is not None or bool(self._unacked)

    @property
    def _has_idled(self) -> bool:
        """True once the connection must not be written on any more."""
        return not self._is_busy and self._clock() >= self._sent_at + self._settings.idle_seconds

    def _await(self, sock: socket.socket, events: int, deadline: float) -> None:
        while not self._wait(sock, events, deadline):
            if self._clock() >= deadline:
                raise TimeoutError(f"no answer in {self._settings.connect_seconds:g} s")

    def _wait(self, sock: socket.socket, events: int, deadline: float) -> bool:
        """Wait for the socket (True), a wake-up or the deadline.  Raises Stopped."""
        poll = select.poll()
        poll.register(sock, events)
        poll.register(self._waiter, select.POLLIN)
        timeout_ms = max(0, math.ceil((deadline - self._clock()) * 1000))
        ready = {fd for fd, _ in poll.poll(timeout_ms)}
        if self._waiter.fileno() in ready:
            self._waiter.recv(4096)
        if self._is_stopping:
            raise Stopped
        return sock.fileno() in ready

    def _abandon(self) -> None:
        """Let go of a frame that will not be finished, so that its epoch can end."""
        frame, self._frame, self._views = self._frame, None, []
        self._unacked.clear()
        self._inbound = b""
        self._placing.leave()
        if frame is not None:
            self._outbox.release(frame)


def _skip(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Rest of `views` after their first `num_bytes`."""
    index = 0
    while index < len(views) and num_bytes >= len(views[index]):
        num_bytes -= len(views[index])
        index += 1
    rest = views[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
