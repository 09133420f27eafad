"""The sending side of one port: what waits to be written, and when a source block is no longer
read.
"""

# Both transports take their work from here, so they share one set of rules: writes of a shard keep
# their order, `ShardSent` follows each acknowledgement, `ShardEnded` comes once, and only while no
# block of the shard is being read. A frame's source blocks are read between `take` and `release`,
# and at no other time. Knows nothing of sockets.

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import TransferRoute
from pdcluster_worker.kv_transfer.sharded import (
    Emit,
    HeadShard,
    PeerAddress,
    ShardChecksum,
    ShardEnded,
    ShardSent,
)


@dataclass(slots=True, eq=False)
class OutgoingShard:
    """One shard that is written to a peer; `reason` is set once it fails or is cancelled."""

    part: HeadShard
    peer: PeerAddress
    checksum: ShardChecksum
    verify: bool  # its blocks are summed up
    queued: deque[tuple[int, int]] = field(default_factory=deque)
    num_unacked: int = 0
    is_reading: bool = False
    reason: str | None = None

    @property
    def is_busy(self) -> bool:
        """True while something is queued or not acknowledged."""
        return bool(self.queued) or self.num_unacked > 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Consecutive blocks of one shard that travel together."""

    send: OutgoingShard
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Outbox:
    """All shards that one port sends; safe from any thread, never waits."""

    def __init__(self, verify: bool, emit: Emit, clock: Callable[[], float]) -> None:
        self._verify = verify
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._sends: dict[HeadShard, OutgoingShard] = {}
        self._ready: dict[PeerAddress, deque[OutgoingShard]] = {}

    def write(
        self,
        part: HeadShard,
        peer: PeerAddress,
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """Queue (source, target) pairs; after the shard has ended they are dropped unread."""
        with self._lock:
            send = self._sends.get(part)
            if send is None:
                checksum = ShardChecksum(part.heads)
                send = OutgoingShard(part, peer, checksum, verify or self._verify)
                self._sends[part] = send
            if send.reason is not None or not pairs:
                return
            if not send.queued:
                self._ready.setdefault(peer, deque()).append(send)
            send.queued.extend(pairs)

    def has_work(self, peer: PeerAddress) -> bool:
        with self._lock:
            return any(send.queued for send in self._ready.get(peer, ()))

    def take(self, peer: PeerAddress, max_blocks: int) -> Frame | None:
        """The next frame for this peer; its sources are read until `release`."""
        with self._lock:
            ready = self._ready.get(peer, deque())
            while ready and not ready[0].queued:  # ended while it waited
                ready.popleft()
            if not ready:
                self._ready.pop(peer, None)
                return None
            send = ready[0]
            count = min(len(send.queued), max_blocks)
            pairs = [send.queued.popleft() for _ in range(count)]
            send.num_unacked += count
            send.is_reading = True
            if not send.queued:
                ready.popleft()
            return Frame(
                send, tuple(source for source, _ in pairs), tuple(target for _, target in pairs)
            )

    def release(self, frame: Frame, crcs: Sequence[Sequence[int]] = ()) -> None:
        """The frame's sources are no longer read; `crcs` of its heads if verified."""
        with self._lock:
            frame.send.is_reading = False
            frame.send.checksum.extend(crcs)
            if frame.send.reason is not None:
                self._emit(ShardEnded(frame.send.part, frame.send.reason))

    def next_epoch(self, peer: PeerAddress) -> bytes | None:
        with self._lock:
            ready = self._ready.get(peer, ())
            return next((send.part.epoch for send in ready if send.queued), None)

    def acknowledge(self, frame: Frame, route: TransferRoute) -> None:
        """The peer has the frame's blocks, which went that way."""
        with self._lock:
            frame.send.num_unacked -= len(frame.sources)
            if frame.send.reason is None:
                checksum = frame.send.checksum.value if frame.send.verify else None
                self._emit(
                    ShardSent(frame.send.part, frame.sources, checksum, self._clock(), route)
                )

    def refuse(self, frame: Frame, reason: str) -> None:
        """The peer did not take the frame: its shard ends."""
        with self._lock:
            self._end(frame.send, f"refused: {reason}")

    def fail(self, peer: PeerAddress, reason: str) -> None:
        """The connection is gone: shards with work there end, idle ones may go on."""
        with self._lock:
            for send in self._sends.values():
                if send.peer == peer and send.is_busy:
                    self._end(send, reason)
            self._ready.pop(peer, None)

    def cancel(self, part: HeadShard) -> None:
        """End a shard; `ShardEnded` comes here, or by `release` if a frame is being read."""
        with self._lock:
            send = self._sends.get(part)
            if send is None:
                self._emit(ShardEnded(part, "cancelled"))
            else:
                self._end(send, "cancelled")

    def forget(self, part: HeadShard) -> None:
        """Drop a shard that has ended or is acknowledged; unknown ones are a no-op."""
        with self._lock:
            self._sends.pop(part, None)

    def _end(self, send: OutgoingShard, reason: str) -> None:
        if send.reason is not None:
            return
        send.reason = reason
        send.queued.clear()
        if not send.is_reading:
            self._emit(ShardEnded(send.part, reason))
