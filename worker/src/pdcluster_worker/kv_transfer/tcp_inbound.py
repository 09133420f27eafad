"""One connection to the KV port: its hello, then frames into open blocks."""

import hmac
import math
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.kv_transfer import sockets, wire
from pdcluster_worker.kv_transfer.carrier import Carrier, agreed
from pdcluster_worker.kv_transfer.carrier_receiver import CarrierReceiver
from pdcluster_worker.kv_transfer.connection_limiter import PortLimits
from pdcluster_worker.kv_transfer.inbox import DEAD_EPOCH, Inbox, IncomingShard
from pdcluster_worker.messages.requests import EPOCH_BYTES

_SCRATCH_BYTES = 256 << 10
_BROKE_OFF = "the peer closed within a frame"
_ANOTHER = "another engine listens here"


Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class InboundSettings:
    """Settings of all connections to a port.  carriers: by kind.  is_closing: of the port."""

    limits: PortLimits
    carriers: Mapping[str, Carrier]
    is_closing: Callable[[], bool]


class Inbound:
    """`serve` once, in a thread of its own; a shutdown of the socket from elsewhere ends it."""

    def __init__(
        self,
        sock: socket.socket,
        inbox: Inbox,
        memory: KVMemory,
        engine_id: str,
        settings: InboundSettings,
    ) -> None:
        self._sock = sock
        self._inbox = inbox
        self._memory = memory
        self._engine_id = engine_id
        self._limits = settings.limits
        self._settings = settings
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
        if not hmac.compare_digest(hello.engine_id.encode(), self._engine_id.encode()):
            self._sock.sendall(wire.encode_reply(wire.Reply(_ANOTHER)))
            raise ConnectionRefusedError("its hello is not for this engine")
        if (objection := authenticate()) is not None:
            self._sock.sendall(wire.encode_reply(wire.Reply(objection)))
            raise ConnectionRefusedError(objection)
        carriers = self._settings.carriers
        kind = agreed(hello.carriers, tuple(carriers))
        if kind:
            self._fetching = CarrierReceiver(carriers[kind], self._settings.is_closing)
        self._sock.sendall(wire.encode_reply(wire.Reply(carrier=kind)))
        try:
            while (message := self._next_request()) is not None:
                self._sock.sendall(self._answer(message))
        finally:
            if self._fetching is not None:
                self._fetching.close()

    def _next_request(self) -> wire.KvRequest | None:
        return self._read(wire.decode_request, self._limits.idle_seconds)

    def _answer(self, message: wire.KvRequest) -> bytes:
        match message:
            case wire.Attach():
                return wire.encode_attached(self._attach(message))
            case wire.CarrierProbe():
                refusal = self._agreed_fetching.try_out(message)
                return wire.encode_ack(wire.Ack(bytes(EPOCH_BYTES), refusal))
            case wire.Header():
                return wire.encode_ack(wire.Ack(message.epoch, self._receive(message)))
        raise wire.WireError("unknown message")

    def _attach(self, message: wire.Attach) -> wire.Attached:
        if not self._inbox.is_open(message.epoch):
            return wire.Attached(refusal=DEAD_EPOCH)
        return self._agreed_fetching.attach(message.blob)

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
