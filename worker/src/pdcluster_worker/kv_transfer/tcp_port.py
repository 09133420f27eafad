"""One rank's slices of KV blocks over TCP, whose payloads a carrier may bring.

Puts together the KV port (`tcp_receiver`), the connections to peers
(`tcp_sender`) and the epoch rules of both sides (`inbox`, `outbox`).  No call
waits for a peer or for a thread, `close` excepted; `wake` is called from any
thread when `poll` has something.  Confidentiality is the network's; integrity
of writes is the epoch's: a secret that the receiver gave out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.kv_transfer import wire
from pdcluster_worker.kv_transfer.carriers import TransportName, open_carriers
from pdcluster_worker.kv_transfer.connection_limiter import PortLimits
from pdcluster_worker.kv_transfer.events import EventQueue
from pdcluster_worker.kv_transfer.head_shards import HeadShard, ShardEvent
from pdcluster_worker.kv_transfer.inbox import Inbox
from pdcluster_worker.kv_transfer.outbox import Outbox
from pdcluster_worker.kv_transfer.rate_limit import TokenBucket
from pdcluster_worker.kv_transfer.tcp_link import LinkSettings
from pdcluster_worker.kv_transfer.tcp_receiver import ReceiverSettings, TcpReceiver
from pdcluster_worker.kv_transfer.tcp_sender import TcpSender

DEFAULT_LIMITS = PortLimits()
PACED_FRAMES_PER_SECOND = 20
"""Frames per second under a bandwidth cap: frames shrink to this share of a second, so that the
flow is even.
"""


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """Settings of a port and its connections.

    bandwidth: most bytes per second that all connections together send; 0 = no cap.
    transport: that is asked for, see `kv_transfer.carriers`.
    clock:     monotonic seconds, of the sending side: the engine's.
    limits:    what the KV port bears.
    """

    verify: bool = False
    bandwidth: int = 0
    transport: TransportName = "tcp"
    connect_seconds: float = 5.0
    stall_seconds: float = 30.0
    clock: Callable[[], float] = time.monotonic
    limits: PortLimits = DEFAULT_LIMITS


class TcpPort:
    """`head_shards.ShardPort`; listens from construction to `close`.

    Raises ConfigError if the port cannot be bound, or this process has not the transport.
    """

    def __init__(
        self,
        memory: KVMemory,
        engine_id: str,
        listen: tuple[str, int],
        wake: Callable[[], None],
        settings: TcpSettings,
    ) -> None:
        """listen: host and port, 0 for any free one."""
        self.heads = memory.heads
        self.block_bytes = memory.head_bytes * len(memory.heads)
        self._events = EventQueue(wake)
        self._carriers = open_carriers(
            settings.transport,
            f"{engine_id}-{self.heads.start}",
            wire.frame_bytes(self.block_bytes),
            memory,
        )
        self._inbox = Inbox(memory, settings.verify, self._events.put)
        self._outbox = Outbox(settings.verify, self._events.put, settings.clock)
        links = LinkSettings(
            bucket=TokenBucket(settings.bandwidth),
            frame_blocks=frame_blocks(self.block_bytes, settings.bandwidth),
            carriers=self._carriers,
            connect_seconds=settings.connect_seconds,
            stall_seconds=settings.stall_seconds,
            clock=settings.clock,
        )
        self._sender = TcpSender(self._outbox, memory, links)
        self._receiver = TcpReceiver(
            self._inbox,
            memory,
            engine_id,
            listen,
            ReceiverSettings(settings.limits, self._carriers),
        )
        self.port = self._receiver.port

    @property
    def num_bad_connections(self) -> int:
        """Connections to the KV port that were closed because their bytes were not the protocol."""
        return self._receiver.num_bad_connections

    @property
    def transport(self) -> str:
        """That it uses with peers which have it too."""
        return self._carriers.requested or "tcp"

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """See head_shards.ShardPort; blocks must be written in this order.

        Raises ValueError on a block that another epoch has open.
        """
        self._inbox.open(epoch, block_ids, verify=verify)

    def fence(self, epoch: bytes) -> None:
        """See head_shards.ShardPort; never waits for a peer: bytes that still arrive go."""
        self._inbox.fence(epoch)

    def write(
        self,
        part: HeadShard,
        engine_id: str,
        address: str,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """See head_shards.ShardPort; address is "host:port", an IPv6 host in brackets."""
        self._sender.write(part, (engine_id, address), pairs, verify=verify)

    def forget(self, part: HeadShard) -> None:
        """See head_shards.ShardPort."""
        self._outbox.forget(part)

    def cancel(self, part: HeadShard) -> None:
        """See head_shards.ShardPort; a frame that is half sent is finished first, in its
        own thread.
        """
        self._outbox.cancel(part)

    def poll(self) -> list[ShardEvent]:
        """See head_shards.ShardPort."""
        return self._events.poll()

    def close(self) -> None:
        """See head_shards.ShardPort; joins the threads, in a bounded time."""
        self._sender.close()
        self._receiver.close()
        self._carriers.close()


def frame_blocks(block_bytes: int, bandwidth: int) -> int:
    """Blocks of one frame at most: FRAME_BYTES, less under a low bandwidth cap, at least one."""
    target = wire.FRAME_BYTES
    if bandwidth:
        target = min(target, bandwidth // PACED_FRAMES_PER_SECOND)
    return min(max(1, target // block_bytes), wire.MAX_FRAME_BLOCKS)
