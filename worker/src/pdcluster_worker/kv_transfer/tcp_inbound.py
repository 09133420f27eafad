"""One connection to the KV port: its hello, then frames into open blocks."""

import hmac
import math
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.kv_transfer import sockets, wire
from pdcluster_worker.kv_transfer.carrier import (
    SLOT_SECONDS,
    Carrier,
    CarrierError,
    CarrierIncoming,
    Fetch,
    Slot,
)
from pdcluster_worker.kv_transfer.inbox import DEAD_EPOCH, Inbox, IncomingShard
from pdcluster_worker.messages.requests import EPOCH_BYTES

PROBE_SECONDS = 3.0
"""For a probe to come: what a carrier does not bring in this time goes over the connection."""

FETCH_SECONDS = 60.0
"""Without a payload that was announced; then its connection ends."""

_FIRST_PAUSE = 20e-6
_LONGEST_PAUSE = 1e-3

_SCRATCH_BYTES = 256 << 10
_BROKE_OFF = "the peer closed within a frame"
_ANOTHER = "another engine listens here"


Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits of a KV port, in seconds of silence and in connections."""

    hello_seconds: float = 5.0  # to introduce oneself, from the first byte to the last
    # Without a whole header, or within a frame without a byte; a sender that has nothing to write
    # leaves earlier (`tcp_link.LinkSettings.idle_seconds`).
    idle_seconds: float = 60.0
    ack_seconds: int = 30  # without room for an acknowledgement
    # With a hello, a thread each.  A pool has at most 1024 workers, with one connection of each
    # rank that writes here; twice that, because one of a pod that is gone may be held for
    # idle_seconds beside that of its replacement.
    max_connections: int = 2048
    # Of these from one address: one pod has one of each of its ranks, and all pods of a machine may
    # share its address (host network, address translation between machines).
    max_per_address: int = 512
    max_unauthenticated: int = 128  # without a hello, beyond these
    max_unauthenticated_per_address: int = 64  # of these from one address

    def within(self, num_files: int) -> "PortLimits":
        """These, for a process that may have so many connections in all; at least one peer."""
        return replace(
            self,
            max_connections=max(1, min(self.max_connections, num_files - self.max_unauthenticated)),
        )


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    """The receiving side of a port, as all connections to it share it."""

    inbox: Inbox
    memory: KVMemory
    engine_id: str
    limits: PortLimits
    carriers: Mapping[str, Carrier]  # that peers may ask for, by kind


class CarrierReceiver:
    """One per connection; `close` with it.  is_stopped: True once the port is closing."""

    def __init__(self, carrier: Carrier, is_stopped: Callable[[], bool]) -> None:
        self._carrier = carrier
        self._is_stopped = is_stopped
        self._incoming: CarrierIncoming | None = None

    def attach(self, blob: bytes) -> wire.Attached:
        """Have the carrier reach the sender, by what that said of its side."""
        self.close()
        try:
            self._incoming = self._carrier.incoming(blob)
        except CarrierError as e:
            return wire.Attached(refusal=str(e))
        return wire.Attached(self._incoming.blob)

    def try_out(self, probe: wire.CarrierProbe) -> str | None:
        """Bring the bytes of a probe; returns why it is not used, if it does not bring them."""
        try:
            slot = self.fetch(probe.place, len(probe.data), PROBE_SECONDS)
        except (CarrierError, TimeoutError) as e:
            self.close()
            return f"{self._carrier.kind} does not reach the sender: {e}"
        came = slot.memory.read(slot.start, len(probe.data))
        self.give_back(slot)
        if came == probe.data:
            return None
        self.close()
        return f"{self._carrier.kind} brought other bytes than the sender's"

    def fetch(self, place: int, num_bytes: int, seconds: float = FETCH_SECONDS) -> Slot:
        """A slot with these bytes, to be given back.  Raises CarrierError, TimeoutError."""
        if self._incoming is None:
            raise wire.WireError("a payload was announced by a carrier that was not attached")
        slot = self._carrier.receiving.take(SLOT_SECONDS)
        if slot is None:
            raise CarrierError("no slot is free")
        if num_bytes > slot.num_bytes:
            self.give_back(slot)
            raise wire.WireError(f"a payload of {num_bytes} bytes fits no slot")
        fetch: Fetch | None = None
        try:
            fetch = self._incoming.fetch(place, num_bytes, slot)
            self._wait(fetch, seconds)
        except CarrierError:
            self.give_back(slot)
            raise
        except (TimeoutError, ConnectionAbortedError):
            if fetch is not None:
                self._carrier.receiving.lose(slot, fetch)
            raise
        return slot

    def give_back(self, slot: Slot) -> None:
        """After its bytes were copied, or dropped."""
        self._carrier.receiving.give_back(slot)

    def close(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()

    def _wait(self, fetch: Fetch, seconds: float) -> None:
        """Look at growing distances: a carrier wakes no thread, and a frame takes about 1 ms.

        Raises TimeoutError, ConnectionAbortedError, CarrierError.
        """
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not fetch():
            if self._is_stopped():
                raise ConnectionAbortedError("the KV port is closing")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the carrier brought nothing in {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class Inbound:
    """`serve` once, in a thread of its own; a shutdown of the socket from elsewhere ends it."""

    def __init__(
        self, sock: socket.socket, end: ReceivingEnd, is_closing: Callable[[], bool]
    ) -> None:
        """is_closing: of the port."""
        self._sock = sock
        self._end = end
        self._inbox, self._memory, self._limits = end.inbox, end.memory, end.limits
        self._is_closing = is_closing
        self._fetching: CarrierReceiver | None = None
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def serve(self, authenticate: Callable[[], str | None]) -> None:
        """Until the peer closes between messages.

        authenticate: called after the right hello; returns why there is no place for this peer
        Raises WireError on bytes that are not the protocol, OSError on a lost or silent peer,
        ConnectionRefusedError on one that was refused.
        """
        sockets.tune(self._sock)
        sockets.limit_send_wait(self._sock, self._limits.ack_seconds)
        hello = self._read(wire.decode_hello, self._limits.hello_seconds)
        if hello is None:
            return
        if not hmac.compare_digest(hello.engine_id.encode(), self._end.engine_id.encode()):
            self._sock.sendall(wire.encode_reply(wire.Reply(_ANOTHER)))
            raise ConnectionRefusedError("its hello is not for this engine")
        if (objection := authenticate()) is not None:
            self._sock.sendall(wire.encode_reply(wire.Reply(objection)))
            raise ConnectionRefusedError(objection)
        carriers = self._end.carriers
        kind = next((each for each in hello.carriers if each in carriers), "")  # the sender's best
        if kind:
            self._fetching = CarrierReceiver(carriers[kind], self._is_closing)
        self._sock.sendall(wire.encode_reply(wire.Reply(carrier=kind)))
        try:
            idle_seconds = self._limits.idle_seconds
            while (message := self._read(wire.decode_request, idle_seconds)) is not None:
                self._sock.sendall(self._answer(message))
        finally:
            if self._fetching is not None:
                self._fetching.close()

    def _answer(self, message: wire.KvRequest) -> bytes:
        match message:
            case wire.Attach():
                attached = wire.Attached(refusal=DEAD_EPOCH)
                if self._inbox.is_open(message.epoch):
                    attached = self._agreed_fetching.attach(message.blob)
                return wire.encode_attached(attached)
            case wire.CarrierProbe():
                refusal = self._agreed_fetching.try_out(message)
                return wire.encode_ack(wire.Ack(bytes(EPOCH_BYTES), refusal))
            case wire.Header():
                return wire.encode_ack(wire.Ack(message.epoch, self._receive(message)))
        raise wire.WireError("unknown message")

    @property
    def _agreed_fetching(self) -> CarrierReceiver:
        if self._fetching is None:
            raise wire.WireError("a carrier is used that was not agreed on")
        return self._fetching

    def _receive(self, header: wire.Header) -> str | None:
        """Take one frame's payload, into its blocks or nowhere; returns why not if refused."""
        block_bytes = self._memory.head_bytes * len(header.heads)
        limit = wire.frame_bytes(self._memory.head_bytes * len(self._memory.heads))
        if header.payload_bytes > limit:
            raise wire.WireError(
                f"payload bytes: {header.payload_bytes} is over the limit of {limit}"
            )
        num_blocks = len(header.block_ids)
        if header.payload_bytes != num_blocks * block_bytes:
            self._drop(header)
            return (
                f"a block has {block_bytes} bytes, not {header.payload_bytes} for {num_blocks} "
                "blocks"
            )
        arriving = self._inbox.claim(header.epoch, header.heads, header.block_ids)
        if isinstance(arriving, str):
            self._drop(header)
            return arriving
        if header.place is not None:
            return self._receive_placed(header, header.place, arriving)
        remaining = header.payload_bytes
        for block_id in header.block_ids:
            staging = self._memory.staging(block_id, header.heads)
            remaining -= self._fill(arriving, staging)
            write_block = partial(self._memory.write_block, block_id, staging, header.heads)
            if not self._inbox.complete(arriving, block_id, write_block):
                self._drain(remaining)
                return DEAD_EPOCH
        return None

    def _receive_placed(
        self, header: wire.Header, place: int, arriving: IncomingShard
    ) -> str | None:
        fetching = self._agreed_fetching
        slot = fetching.fetch(place, header.payload_bytes)
        try:
            start, size = slot.start, header.payload_bytes // len(header.block_ids)
            for block_id in header.block_ids:
                write_block = partial(slot.memory.write_block, start, block_id, header.heads)
                if not self._inbox.complete(arriving, block_id, write_block):
                    return DEAD_EPOCH
                start += size
        finally:
            fetching.give_back(slot)
        return None

    def _drop(self, header: wire.Header) -> None:
        if header.place is None:
            self._drain(header.payload_bytes)
        else:
            fetching = self._agreed_fetching
            fetching.give_back(fetching.fetch(header.place, header.payload_bytes))

    def _fill(self, arriving: IncomingShard, block: memoryview) -> int:
        """Read one block's bytes into it, until its epoch is fenced; returns the bytes read."""
        filled = 0
        while filled < len(block) and self._inbox.enter(arriving):
            try:
                num_bytes = self._sock.recv_into(block[filled:], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_bytes = None
            finally:
                self._inbox.leave(arriving)
            filled += self._counted(num_bytes)
        return filled

    def _drain(self, num_bytes: int) -> None:
        """Read a refused payload away; its size was bounded."""
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            try:
                received = self._sock.recv_into(scratch[:num_bytes], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                received = None
            num_bytes -= self._counted(received)

    def _counted(self, num_bytes: int | None) -> int:
        """Bytes of one look, or of the next wait.  Raises ConnectionAbortedError."""
        if num_bytes is None:  # no block is in the kernel's hands while we wait
            self._wait(self._limits.idle_seconds)
            return 0
        if num_bytes == 0:
            raise ConnectionAbortedError(_BROKE_OFF)
        return num_bytes

    def _read(self, decode: Callable[[bytes], Message | int], seconds: float) -> Message | None:
        """The next message; None when the peer has closed.  Raises WireError, TimeoutError."""
        deadline = time.monotonic() + seconds
        data = b""
        while isinstance(message := decode(data), int):
            try:
                chunk = self._sock.recv(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(deadline - time.monotonic(), seconds)
                continue
            if not chunk and data:
                raise wire.WireError("the peer broke off within a message")
            if not chunk:
                return None
            data += chunk
        return message

    def _wait(self, seconds: float, allowed: float | None = None) -> None:
        """Until there are bytes, or their end.  Raises TimeoutError."""
        if not self._readable.poll(max(0, math.ceil(seconds * 1000))):
            raise TimeoutError(f"nothing whole came in {allowed or seconds:g} s")
