"""The sending side of one port: what waits to be written, and when a source block is no longer
read.

Both transports take their work from here, so they share one set of rules:
writes of a slice keep their order, `ShardSent` follows each acknowledgement,
`ShardEnded` comes once, and only while no block of the slice is being read.
A frame's source blocks are read between `take` and `release`, and at no other
time.  Knows nothing of sockets.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import TransferRoute
from pdcluster_worker.kv_transfer.head_shards import Emit, HeadShard, ShardEnded, ShardSent
from pdcluster_worker.kv_transfer.layout import ShardChecksum

PeerAddress = tuple[str, str]
"""(engine_id, address): a restarted engine is another peer."""


@dataclass(slots=True, eq=False)
class OutgoingShard:
    """One slice that is being written to a peer.  `reason` is set once it ends by failure or
    cancel.

    verify: its blocks are summed up.
    """

    part: HeadShard
    peer: PeerAddress
    checksum: ShardChecksum
    verify: bool
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
    """Consecutive blocks of one slice that travel together."""

    send: OutgoingShard
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Outbox:
    """All slices that one port sends; safe from any thread, never waits.

    clock: the engine's, for when a frame was acknowledged.
    """

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
        """Queue (source, target) pairs, of one peer for each slice.

        After the slice has ended they are dropped unread: its `ShardEnded` speaks for them too.
        """
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
        """True when `take` would return a frame."""
        with self._lock:
            return any(send.queued for send in self._ready.get(peer, ()))

    def take(self, peer: PeerAddress, max_blocks: int) -> Frame | None:
        """The next frame for this peer, at most `max_blocks` long; its sources are read until
        `release`.
        """
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
        """The frame's source blocks are no longer read; `crcs` of its blocks' heads where
        `verify` says so.
        """
        with self._lock:
            frame.send.is_reading = False
            frame.send.checksum.extend(crcs)
            if frame.send.reason is not None:
                self._emit(ShardEnded(frame.send.part, frame.send.reason))

    def next_epoch(self, peer: PeerAddress) -> bytes | None:
        """Epoch of what `take` would return next."""
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
        """The peer did not take the frame: its slice ends."""
        with self._lock:
            self._end(frame.send, f"refused: {reason}")

    def fail(self, peer: PeerAddress, reason: str) -> None:
        """The connection to this peer is gone: every slice with work under way there ends; idle
        ones may go on over the next connection.
        """
        with self._lock:
            for send in self._sends.values():
                if send.peer == peer and send.is_busy:
                    self._end(send, reason)
            self._ready.pop(peer, None)

    def cancel(self, part: HeadShard) -> None:
        """End a slice; `ShardEnded` is emitted here, or by `release` if a frame is being read.

        Nothing more for one that has ended.
        """
        with self._lock:
            send = self._sends.get(part)
            if send is None:
                self._emit(ShardEnded(part, "cancelled"))
            else:
                self._end(send, "cancelled")

    def forget(self, part: HeadShard) -> None:
        """Drop the record of a slice that has ended or is fully acknowledged; unknown ones are a
        no-op.
        """
        with self._lock:
            self._sends.pop(part, None)

    def _end(self, send: OutgoingShard, reason: str) -> None:
        if send.reason is not None:
            return
        send.reason = reason
        send.queued.clear()
        if not send.is_reading:
            self._emit(ShardEnded(send.part, reason))
