"""The sending side's epochs: what waits to be written, and when a source block is no longer read.

Both transports take their work from here, so they share one set of rules:
writes of an epoch keep their order, `BlocksSent` follows each acknowledgement,
`SendEnded` comes once, and only while no block of the epoch is being read.
A frame's source blocks are read between `take` and `release`, and at no other
time.  Knows nothing of sockets.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.ports import BlocksSent, SendEnded
from pdcluster_worker.transfer.layout import CHECKSUM_START, extend_checksum

PeerAddress = tuple[str, str]
"""(engine_id, address): a restarted engine is another peer."""


@dataclass(slots=True, eq=False)
class OutgoingEpoch:
    """One epoch that is being written to a peer.  `reason` is set once it ends by failure or cancel."""

    epoch: bytes
    peer: PeerAddress
    queued: deque[tuple[int, int]] = field(default_factory=deque)
    num_unacked: int = 0
    checksum: int = CHECKSUM_START
    is_reading: bool = False
    reason: str | None = None

    @property
    def is_busy(self) -> bool:
        """True while something is queued or not acknowledged."""
        return bool(self.queued) or self.num_unacked > 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Consecutive blocks of one epoch that travel together."""

    send: OutgoingEpoch
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Outbox:
    """All epochs that one engine sends; safe from any thread, never waits.

    clock: the engine's, for when a frame was acknowledged.
    """

    def __init__(
        self,
        block_bytes: int,
        verify: bool,
        emit: Callable[[BlocksSent | SendEnded], None],
        clock: Callable[[], float],
    ) -> None:
        self._block_bytes = block_bytes
        self._verify = verify
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._sends: dict[bytes, OutgoingEpoch] = {}
        self._ready: dict[PeerAddress, deque[OutgoingEpoch]] = {}

    def write(self, epoch: bytes, peer: PeerAddress, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue (source, target) pairs.  After the epoch has ended they are dropped unread: its `SendEnded` speaks for them too."""
        with self._lock:
            send = self._sends.setdefault(epoch, OutgoingEpoch(epoch, peer))
            if send.peer != peer:
                raise ValueError(f"an epoch is written to one peer: {send.peer}, not {peer}")
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
        """The next frame for this peer, at most `max_blocks` long; its sources are read until `release`."""
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
            return Frame(send, tuple(source for source, _ in pairs), tuple(target for _, target in pairs))

    def release(self, frame: Frame, crcs: Sequence[int] = ()) -> None:
        """The frame's source blocks are no longer read; `crcs` of its blocks when verification is on."""
        with self._lock:
            frame.send.is_reading = False
            frame.send.checksum = extend_checksum(frame.send.checksum, crcs)
            if frame.send.reason is not None:
                self._emit(SendEnded(frame.send.epoch, frame.send.reason))

    def acknowledge(self, frame: Frame) -> None:
        """The peer has the frame's blocks."""
        with self._lock:
            frame.send.num_unacked -= len(frame.sources)
            if frame.send.reason is None:
                num_bytes = len(frame.sources) * self._block_bytes
                sent = BlocksSent(frame.send.epoch, frame.sources, num_bytes, at=self._clock())
                self._emit(sent)

    def refuse(self, frame: Frame, reason: str) -> None:
        """The peer did not take the frame: its epoch ends."""
        with self._lock:
            self._end(frame.send, f"refused: {reason}")

    def fail(self, peer: PeerAddress, reason: str) -> None:
        """The connection to this peer is gone: every epoch with work under way there ends; idle ones may go on over the next connection."""
        with self._lock:
            for send in self._sends.values():
                if send.peer == peer and send.is_busy:
                    self._end(send, reason)
            self._ready.pop(peer, None)

    def cancel(self, epoch: bytes) -> None:
        """End an epoch; `SendEnded` is emitted here, or by `release` if a frame is being read.  Nothing more for one that has ended."""
        with self._lock:
            send = self._sends.get(epoch)
            if send is None:
                self._emit(SendEnded(epoch, "cancelled"))
            else:
                self._end(send, "cancelled")

    def checksum(self, epoch: bytes) -> int | None:
        """Checksum of the epoch's released frames, in write order; None when verification is off or the epoch is unknown."""
        with self._lock:
            send = self._sends.get(epoch)
            return send.checksum if send is not None and self._verify else None

    def forget(self, epoch: bytes) -> None:
        """Drop the record of an epoch that has ended or is fully acknowledged; unknown ones are a no-op.  Raises ValueError otherwise."""
        with self._lock:
            send = self._sends.get(epoch)
            if send is not None and send.reason is None and send.is_busy:
                raise ValueError("epoch has unacknowledged writes: cancel it and wait for SendEnded first")
            self._sends.pop(epoch, None)

    def _end(self, send: OutgoingEpoch, reason: str) -> None:
        if send.reason is not None:
            return
        send.reason = reason
        send.queued.clear()
        if not send.is_reading:
            self._emit(SendEnded(send.epoch, reason))
