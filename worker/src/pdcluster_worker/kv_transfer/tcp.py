"""KV blocks over TCP, whose payloads a carrier may bring: the transport between processes.

No call waits for a peer or for a thread, `close` excepted; `wake` is called from any thread when
`poll` has something.  Confidentiality is the network's; integrity of writes is the epoch's: a
secret that the receiver gave out.

Each peer that is written to has one thread with one connection (`kv_transfer.tcp_link`).  A
connection that fails ends every shard with work on it; the next write starts another.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.errors import PeerError
from pdcluster_worker.kv_transfer import sockets, wire
from pdcluster_worker.kv_transfer.carriers import TransportName, open_carriers
from pdcluster_worker.kv_transfer.inbox import Inbox
from pdcluster_worker.kv_transfer.outbox import Outbox
from pdcluster_worker.kv_transfer.sharded import (
    EventQueue,
    HeadShard,
    Pairs,
    PeerAddress,
    ShardedTransport,
    ShardPort,
)
from pdcluster_worker.kv_transfer.tcp_inbound import PortLimits, ReceivingEnd
from pdcluster_worker.kv_transfer.tcp_link import Link, LinkSettings, Stopped, TokenBucket
from pdcluster_worker.kv_transfer.tcp_receiver import TcpReceiver

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0


DEFAULT_LIMITS = PortLimits()
PACED_FRAMES_PER_SECOND = 20
"""Frames per second under a bandwidth cap: frames shrink to this share of a second, so that the
flow is even.
"""


@dataclass(frozen=True, slots=True)
class TcpSettings:
    """Settings of a port and its connections."""

    verify: bool = False
    bandwidth: int = 0  # most bytes per second that all connections together send; 0 = no cap
    transport: TransportName = "tcp"  # that is asked for, see `kv_transfer.carriers`
    connect_seconds: float = 5.0
    stall_seconds: float = 30.0
    # Monotonic seconds, of the sending side: the engine's.
    clock: Callable[[], float] = time.monotonic
    limits: PortLimits = DEFAULT_LIMITS  # what the KV port bears


class TcpPort:
    """`ShardPort`.  Raises ConfigError if it cannot be bound, or the transport is missing."""

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
        self._memory = memory
        self._lock = threading.Lock()
        self._links: dict[PeerAddress, tuple[Link, threading.Thread]] = {}
        events = EventQueue(wake)
        self._carriers = open_carriers(
            settings.transport,
            f"{engine_id}-{self.heads.start}",
            wire.frame_bytes(self.block_bytes),
            memory,
        )
        inbox = Inbox(memory, settings.verify, events.put)
        self._outbox = Outbox(settings.verify, events.put, settings.clock)
        self._link_settings = LinkSettings(
            bucket=TokenBucket(settings.bandwidth),
            frame_blocks=frame_blocks(self.block_bytes, settings.bandwidth),
            carriers=self._carriers,
            connect_seconds=settings.connect_seconds,
            stall_seconds=settings.stall_seconds,
            clock=settings.clock,
        )
        self._receiver = TcpReceiver(
            ReceivingEnd(inbox, memory, engine_id, settings.limits, self._carriers.known), listen
        )
        self.port = self._receiver.port
        # The rest of `ShardPort` is the rules of epochs on either side.
        self.open, self.fence = inbox.open, inbox.fence
        self.forget, self.cancel = self._outbox.forget, self._outbox.cancel
        self.poll = events.poll

    @property
    def num_bad_connections(self) -> int:
        """Connections to the KV port that were closed because their bytes were not the protocol."""
        return self._receiver.num_bad_connections

    @property
    def transport(self) -> str:
        return self._carriers.requested or "tcp"

    def write(
        self, part: HeadShard, peer: PeerAddress, pairs: Pairs, *, verify: bool = False
    ) -> None:
        """Queue, and wake or start the peer's thread."""
        with self._lock:
            self._outbox.write(part, peer, pairs, verify=verify)
            if not self._outbox.has_work(peer):
                return
            if peer in self._links:
                self._links[peer][0].wake()
            else:
                self._start(peer)

    def close(self) -> None:
        """End all threads, in a bounded time; no event follows."""
        deadline = time.monotonic() + JOIN_SECONDS
        with self._lock:
            links = list(self._links.values())
            for link, _ in links:
                link.stop()
        for _, thread in links:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._receiver.close()
        self._carriers.close()

    def _start(self, peer: PeerAddress) -> None:
        link = Link(peer, self._outbox, self._memory, self._link_settings)
        thread = threading.Thread(
            target=self._run, args=(link,), name=f"kv-to-{peer[1]}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as e:  # no more threads: this peer alone fails
            link.close()
            self._outbox.fail(peer, str(e))
        else:
            self._links[peer] = (link, thread)

    def _run(self, link: Link) -> None:
        """In a thread: connections until one fails, or ends with nothing to send."""
        while True:
            reason = None
            try:
                link.run()
            except Stopped:
                reason = "closed"
            except Exception as e:
                reason = sockets.describe(e)
                is_expected = isinstance(e, OSError | PeerError | ValueError)
                logger.warning(
                    "KV connection failed engine_id=%s address=%s: %s",
                    *(*link.peer, reason),
                    exc_info=not is_expected,
                )
            with self._lock:
                if reason is None and self._outbox.has_work(link.peer):
                    continue  # the peer closed an idle connection just as new work came
                del self._links[link.peer]
                link.close()
                if reason is not None:
                    self._outbox.fail(link.peer, reason)
                return


def frame_blocks(block_bytes: int, bandwidth: int) -> int:
    """Blocks of one frame at most: FRAME_BYTES, less under a low bandwidth cap, at least one."""
    target = wire.FRAME_BYTES
    if bandwidth:
        target = min(target, bandwidth // PACED_FRAMES_PER_SECOND)
    return min(max(1, target // block_bytes), wire.MAX_FRAME_BLOCKS)


class TcpTransport(ShardedTransport):
    """`engine.ports.Transport`; listens from construction to `close`."""

    def __init__(
        self,
        memory: KVMemory,
        engine_id: str,
        listen: tuple[str, int],
        wake: Callable[[], None],
        settings: TcpSettings,
        *,
        others: Sequence[ShardPort] = (),
    ) -> None:
        """others: ports of the engine's other ranks, whose heads follow those of `memory`."""
        # The port of this process.  Raises ConfigError if it cannot be bound, or has not the
        # transport that is asked for.
        self.own = TcpPort(memory, engine_id, listen, wake, settings)
        super().__init__([self.own, *others], wake)
