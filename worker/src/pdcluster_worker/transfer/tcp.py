"""KV blocks over plain TCP: the default transport.

Puts together the KV port (`tcp_receiver`), the connections to peers
(`tcp_sender`) and the epoch rules of both sides (`inbox`, `outbox`).  No call
waits for a peer or for a thread, `close` excepted; `wake` is called from any
thread when `poll` has something.  Confidentiality is the network's; integrity
of writes is the epoch's: a secret that the receiver gave out.
"""

import time
from collections.abc import Callable, Sequence

from pdcluster_worker.engine.ports import KVMemory, TransferEvent
from pdcluster_worker.transfer import wire
from pdcluster_worker.transfer.events import EventQueue
from pdcluster_worker.transfer.inbox import Inbox
from pdcluster_worker.transfer.outbox import Outbox
from pdcluster_worker.transfer.pacing import TokenBucket
from pdcluster_worker.transfer.seats import PortLimits
from pdcluster_worker.transfer.tcp_link import LinkSettings
from pdcluster_worker.transfer.tcp_receiver import TcpReceiver
from pdcluster_worker.transfer.tcp_sender import TcpSender

DEFAULT_LIMITS = PortLimits()
PACED_FRAMES_PER_SECOND = 20
"""Frames per second under a bandwidth cap: frames shrink to this share of a second, so that the flow is even."""


class TcpTransport:
    """`engine.ports.Transport`; listens from construction to `close`.

    bandwidth: most bytes per second that all connections together send; 0 = no cap.
    clock:     monotonic seconds, of the sending side: the engine's.
    limits:    what the KV port bears.
    Raises ConfigError if the port cannot be bound.
    """

    kind = "tcp"
    port: int

    def __init__(
        self,
        memory: KVMemory,
        engine_id: str,
        host: str,
        port: int,
        wake: Callable[[], None],
        *,
        verify: bool = False,
        bandwidth: int = 0,
        connect_seconds: float = 5.0,
        stall_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        limits: PortLimits = DEFAULT_LIMITS,
    ) -> None:
        self._events = EventQueue(wake)
        self._inbox = Inbox(memory, verify, self._events.put)
        self._outbox = Outbox(memory.block_bytes, verify, self._events.put, clock)
        settings = LinkSettings(
            bucket=TokenBucket(bandwidth),
            frame_blocks=frame_blocks(memory.block_bytes, bandwidth),
            verify=verify,
            connect_seconds=connect_seconds,
            stall_seconds=stall_seconds,
            clock=clock,
        )
        self._sender = TcpSender(self._outbox, memory, settings)
        self._receiver = TcpReceiver(self._inbox, memory, engine_id, (host, port), limits)
        self.port = self._receiver.port

    @property
    def num_bad_connections(self) -> int:
        """Connections to the KV port that were closed because their bytes were not the protocol."""
        return self._receiver.num_bad_connections

    def open(self, epoch: bytes, block_ids: Sequence[int]) -> None:
        """See ports.Transport; blocks must be written in this order.  Raises ValueError on a block that another epoch has open."""
        self._inbox.open(epoch, block_ids)

    def fence(self, epoch: bytes) -> None:
        """See ports.Transport; never waits for a peer: bytes that still arrive are read away."""
        self._inbox.fence(epoch)

    def write(self, epoch: bytes, engine_id: str, address: str, pairs: Sequence[tuple[int, int]]) -> None:
        """See ports.Transport; address is "host:port", an IPv6 host in brackets."""
        self._sender.write(epoch, (engine_id, address), pairs)

    def checksum(self, epoch: bytes) -> int | None:
        """See ports.Transport; complete once the last `BlocksSent` has come."""
        return self._outbox.checksum(epoch)

    def forget(self, epoch: bytes) -> None:
        """See ports.Transport; raises ValueError while writes are unacknowledged."""
        self._outbox.forget(epoch)

    def cancel(self, epoch: bytes) -> None:
        """See ports.Transport; a frame that is half sent is finished first, in its own thread."""
        self._outbox.cancel(epoch)

    def poll(self) -> list[TransferEvent]:
        """See ports.Transport."""
        return self._events.poll()

    def close(self) -> None:
        """See ports.Transport; joins the threads, in a bounded time."""
        self._sender.close()
        self._receiver.close()


def frame_blocks(block_bytes: int, bandwidth: int) -> int:
    """Blocks of one frame at most: FRAME_BYTES, less under a low bandwidth cap, at least one."""
    target = wire.FRAME_BYTES
    if bandwidth:
        target = min(target, bandwidth // PACED_FRAMES_PER_SECOND)
    return min(max(1, target // block_bytes), wire.MAX_FRAME_BLOCKS)
