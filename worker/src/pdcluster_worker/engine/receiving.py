"""The decode side of KV transfers: blocks that a peer writes, from `Receive` to the fence.

Guarantees that a block which a peer may still write is neither read nor reused: it stays receiving,
or quarantined once its request is gone, until the transport has fenced the epoch; no time-out frees
it.  A request whose blocks have not all arrived whole is prefilled here, and the client gets no
token twice.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.ports import Fenced, Transport
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.base import GrammarQueue
from pdcluster_worker.messages.engine import (
    Received,
    ReceiveDone,
    ReceiveFailed,
    ReceiveReady,
    ReceiveRefused,
)
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import EPOCH_BYTES, Token

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Transfer:
    """One epoch on the receiving side."""

    request: EngineRequest
    epoch: bytes
    targets: list[int]  # blocks that the peer writes, in order
    # What the peer said when all was written; None before; stays None when the request was given
    # up.
    done: ReceiveDone | None = None
    given_up: bool = False  # the request is gone or computes elsewhere: the targets are quarantined
    fence_seconds: float | None = None  # the clock when the fence was asked for; None before


@dataclass(frozen=True, slots=True)
class FencedTransfer:
    """A fenced transfer of a live request."""

    request: EngineRequest
    done: ReceiveDone  # as the peer said
    usable: bool  # every target arrived whole and unchanged
    # To be reported, of a request with `verify_transfer`; else None.
    received: Received | None = None


def random_epoch() -> bytes:
    """Random, so that no peer can guess it."""
    return secrets.token_bytes(EPOCH_BYTES)


class Receiver:
    """All transfers into this engine that are not fenced yet."""

    def __init__(
        self,
        settings: EngineSettings,
        tables: BlockTables,
        transport: Transport,
        new_epoch: Callable[[], bytes],
    ) -> None:
        self.num_bytes = 0
        self._settings = settings
        self._tables = tables
        self._pool = tables.pool
        self._transport = transport
        self._new_epoch = new_epoch
        self._by_epoch: dict[bytes, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}

    @property
    def num_receiving(self) -> int:
        return len(self._by_request)

    @property
    def num_transfers(self) -> int:
        """Epochs that are not fenced, of live requests or not."""
        return len(self._by_epoch)

    def receive(
        self, request: EngineRequest, num_needed_tokens: int, num_reserved_blocks: int
    ) -> ReceiveReady | ReceiveRefused:
        """Hold blocks for all known tokens and one more, and open those that the peer is to write.

        num_needed_tokens:   tokens that the scheduler wants blocks for, if those are more.
        num_reserved_blocks: what must stay available for others.  A refusal holds nothing.
        """
        num_tokens = max(request.num_tokens + 1, num_needed_tokens)
        reservation = self._tables.reservation(request, num_tokens, received=True)
        needed = reservation.num_needed + num_reserved_blocks
        if needed > self._pool.num_available:
            # Reserves change: it is tried again when there is more room than now, not when the
            # whole pool is free.
            more = self._pool.num_available + reservation.num_new
            return ReceiveRefused(request.request_id, min(needed, more, self._pool.num_blocks))
        self._tables.take(request, reservation)
        request.num_cached_tokens = reservation.num_hit_tokens
        request.status = Status.RECEIVING
        first = request.num_computed_tokens // self._settings.block_size
        targets = request.block_table[first : self._tables.num_blocks(request.num_tokens)]
        self._pool.start_receiving(targets)
        transfer = Transfer(request, self._new_epoch(), targets)
        self._by_epoch[transfer.epoch] = self._by_request[request.request_id] = transfer
        self._transport.open(transfer.epoch, targets, verify=request.verify_transfer)
        logger.info(
            "receiving request=%s blocks=%d cached_tokens=%d",
            request.request_id,
            len(targets),
            request.num_cached_tokens,
        )
        return ReceiveReady(
            request.request_id, transfer.epoch, request.num_computed_tokens, list(targets)
        )

    def expects(self, request_id: str, epoch: bytes) -> EngineRequest | None:
        """Request that this epoch fills, until its end is reported; None for a stale message."""
        transfer = self._by_request.get(request_id)
        if transfer is None or transfer.epoch != epoch or transfer.done is not None:
            return None
        return transfer.request

    def finish(self, message: ReceiveDone, now: float) -> None:
        """The peer reports that all is written; `fenced` returns the result."""
        transfer = self._by_request[message.request_id]
        transfer.done = message
        self._fence(transfer, now)

    def give_up(self, request: EngineRequest, now: float) -> None:
        """Quarantine the targets until the fence; prefix hits are released now."""
        transfer = self._by_request.pop(request.request_id)
        transfer.given_up = True
        self._pool.quarantine(transfer.targets)
        targets = set(transfer.targets)
        request.block_table = [
            block_id for block_id in request.block_table if block_id not in targets
        ]
        self._tables.release(request)
        logger.info("quarantined request=%s blocks=%d", request.request_id, len(targets))
        if transfer.fence_seconds is None:
            self._fence(transfer, now)

    def fenced(self, event: Fenced) -> FencedTransfer | None:
        """No write can land any more: settle the targets; None without a live request."""
        self.num_bytes += event.num_bytes
        transfer = self._by_epoch.pop(event.epoch, None)
        if transfer is None:
            return None
        if transfer.given_up:
            self._pool.release_quarantined(transfer.targets)
            return None
        assert transfer.done is not None, "a live transfer is fenced only after ReceiveDone"
        del self._by_request[transfer.request.request_id]
        self._pool.finish_receiving(transfer.targets)
        request, usable = transfer.request, self._arrived_whole(transfer, transfer.done, event)
        num_new = request.num_tokens - request.num_computed_tokens
        if usable:
            self._tables.advance(request, num_new)
        else:
            self._tables.release(request)
        if not request.verify_transfer:
            return FencedTransfer(request, transfer.done, usable)
        received = Received(
            request.request_id,
            num_new if usable else 0,
            len(event.received),
            event.num_bytes,
            _is_intact(transfer.done, event),
        )
        return FencedTransfer(request, transfer.done, usable, received)

    def num_overdue(self, now: float) -> int:
        """Fences older than `fence_timeout_seconds`; their blocks stay as they are."""
        return sum(1 for due in self._fence_deadlines() if due <= now)

    def next_overdue_seconds(self, now: float) -> float | None:
        """Seconds until the next fence becomes overdue; None when none will."""
        return min((due - now for due in self._fence_deadlines() if due > now), default=None)

    def check(self) -> None:
        """Assert that every receiving block belongs to a live request, or is read from a tier."""
        num_targets = sum(len(transfer.targets) for transfer in self._by_request.values())
        assert num_targets + self._pool.num_loading == self._pool.counts()["receiving"], (
            "a receiving block belongs to no live request"
        )

    def _fence(self, transfer: Transfer, now: float) -> None:
        transfer.fence_seconds = now
        self._transport.fence(transfer.epoch)

    def _fence_deadlines(self) -> list[float]:
        fences = (transfer.fence_seconds for transfer in self._by_epoch.values())
        return [
            since + self._settings.fence_timeout_seconds for since in fences if since is not None
        ]

    @staticmethod
    def _arrived_whole(transfer: Transfer, done: ReceiveDone, event: Fenced) -> bool:
        missing = len(set(transfer.targets) - event.received)
        intact = done.checksum is None or done.checksum == event.checksum
        if missing or not intact:
            logger.warning(
                "unusable transfer request=%s missing=%d intact=%s",
                transfer.request.request_id,
                missing,
                intact,
            )
        return not missing and intact


def _is_intact(done: ReceiveDone, event: Fenced) -> bool | None:
    if done.checksum is None or event.checksum is None:
        return None
    return done.checksum == event.checksum


class RemoteKV:
    """All requests of an engine that wait for a peer.  end: forgets a request."""

    def __init__(
        self,
        receiver: Receiver,
        compiling: GrammarQueue,
        clock: Callable[[], float],
        end: Callable[[EngineRequest], None],
    ) -> None:
        self._receiver = receiver
        self._compiling = compiling
        self._clock = clock
        self._end = end

    def done(self, message: ReceiveDone) -> None:
        request = self._receiver.expects(message.request_id, message.epoch)
        if request is None:
            logger.info("stale ReceiveDone request=%s", message.request_id)
        elif message.first.finish_reason is not None:
            self._end(request)
        else:
            self._receiver.finish(message, self._clock())

    def failed(self, message: ReceiveFailed) -> None:
        request = self._receiver.expects(message.request_id, message.epoch)
        if request is None:
            logger.info("stale ReceiveFailed request=%s", message.request_id)
        elif message.first is not None and message.first.finish_reason is not None:
            self._end(request)
        else:
            self._receiver.give_up(request, self._clock())
            self._prefill_locally(request, message.first)

    def fenced(self, event: Fenced) -> Received | None:
        """Nothing is written any more: the request decodes on, or prefills here."""
        arrival = self._receiver.fenced(event)
        if arrival is None:
            return None
        if not arrival.usable:
            self._prefill_locally(arrival.request, arrival.done.first)
            return arrival.received
        arrival.request.tokens.append(arrival.done.first.token_id)
        arrival.request.status = Status.WAITING
        self._compiling.queue(arrival.request)
        return arrival.received

    def _prefill_locally(self, request: EngineRequest, first: Token | None) -> None:
        if first is not None:
            request.tokens.append(first.token_id)
        request.status = Status.PREEMPTED
        self._compiling.queue(request)
