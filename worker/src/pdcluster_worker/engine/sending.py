"""The prefill side of KV transfers: finished blocks are written to the peer while the next chunk
computes.
"""

# Guarantees that every target block is written at most once, also when its request is preempted and
# recomputed, and that a source block is held from the moment its write is queued until the peer
# acknowledged it or the transport said that it reads no more. Which request computes what is
# `engine.scheduler`'s.

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import ceil_div
from pdcluster_worker.engine.ports import BlocksSent, SendEnded, Transport
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.requests import TransferTarget

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Send:
    """One epoch on the sending side.  first, end: indices in the block table, `end` exclusive."""

    request: EngineRequest
    target: TransferTarget
    first: int
    end: int
    next_index: int  # first one not yet queued
    # Source blocks under a reference of this send, and the clock when each was queued, in that
    # order.
    held: dict[int, float] = field(default_factory=dict)
    cancelled: bool = False  # we stopped it; its end is not reported to the server
    first_seconds: float | None = None  # the clock at the first write
    # The clock when something began to be in flight; None = nothing is.
    busy_since: float | None = None
    # How long something was, by when writes were acknowledged, not by when the engine saw that: it
    # reads nothing while the model computes.
    busy_seconds: float = 0.0
    num_bytes: int = 0

    def acknowledge(self, event: BlocksSent) -> None:
        """Note what is in flight no longer, or was not between that and a later write."""
        self.num_bytes += event.num_bytes
        for block_id in event.block_ids:
            self.held.pop(block_id, None)
        oldest = next(iter(self.held.values()), None)
        if self.busy_since is not None and (oldest is None or oldest > event.at):
            self.busy_seconds += event.at - self.busy_since
            self.busy_since = oldest


class Sender:
    def __init__(self, block_size: int, pool: BlockPool, transport: Transport) -> None:
        self.num_bytes = 0
        self._block_size = block_size
        self._pool = pool
        self._transport = transport
        self._by_epoch: dict[bytes, Send] = {}

    @property
    def num_transfers(self) -> int:
        return len(self._by_epoch)

    def __contains__(self, epoch: bytes) -> bool:
        return epoch in self._by_epoch

    def begin(self, request: EngineRequest, target: TransferTarget) -> None:
        """Note where the blocks of the request's known tokens go; nothing is written yet."""
        first = target.cached_tokens // self._block_size
        end = ceil_div(request.num_tokens, self._block_size)
        self._by_epoch[target.epoch] = Send(request, target, first, end, next_index=first)

    def write_full(self, request: EngineRequest, target: TransferTarget, now: float) -> None:
        """Queue every full computed block that is not queued yet."""
        send = self._by_epoch[target.epoch]
        self._write(send, min(request.num_computed_tokens // self._block_size, send.end), now)

    def write_rest(self, target: TransferTarget, now: float) -> None:
        """All known tokens are computed: queue what is left, the partial last block too."""
        send = self._by_epoch[target.epoch]
        self._write(send, send.end, now)

    def cancel(self, target: TransferTarget) -> None:
        """Stop sending; source blocks stay held until `ended`, if any was written."""
        send = self._by_epoch[target.epoch]
        if send.first_seconds is None:
            del self._by_epoch[target.epoch]
        else:
            send.cancelled = True
            self._transport.cancel(target.epoch)

    def sent(self, event: BlocksSent) -> PrefillDone | None:
        """Release acknowledged blocks; the answer when they were the last."""
        self.num_bytes += event.num_bytes
        send = self._by_epoch.get(event.epoch)
        if send is None:
            return None
        self._pool.release(event.block_ids)
        send.acknowledge(event)
        if send.held or send.next_index < send.end or send.cancelled:
            return None
        assert send.first_seconds is not None, "blocks are acknowledged that were never written"
        checksum = self._transport.checksum(event.epoch)
        self._forget(send)
        seconds = event.at - send.first_seconds
        return PrefillDone(
            *(send.request.request_id, send.num_bytes, seconds, checksum, send.busy_seconds),
            transport=event.route.transport,
            transport_note=event.route.note,
        )

    def ended(self, event: SendEnded) -> EngineRequest | None:
        """No block of the epoch is read any more; returns the request if the peer ended it."""
        send = self._by_epoch.get(event.epoch)
        if send is None:
            return None
        self._pool.release(sorted(send.held))
        self._forget(send)
        logger.info("send ended request=%s reason=%s", send.request.request_id, event.reason)
        return None if send.cancelled else send.request

    def held(self) -> Iterator[int]:
        """Source blocks, once for each send that holds them; good until the pool next moves."""
        return chain.from_iterable([send.held for send in self._by_epoch.values()])

    def _write(self, send: Send, end: int, now: float) -> None:
        if end <= send.next_index:
            return
        sources = send.request.block_table[send.next_index : end]
        targets = send.target.block_ids[send.next_index - send.first : end - send.first]
        self._pool.acquire(sources)
        send.held.update(dict.fromkeys(sources, now))
        send.next_index = end
        if send.first_seconds is None:
            send.first_seconds = now
        if send.busy_since is None:
            send.busy_since = now
        target, pairs = send.target, list(zip(sources, targets, strict=True))
        self._transport.write(
            target.epoch,
            target.engine_id,
            target.addresses,
            pairs,
            verify=send.request.verify_transfer,
        )

    def _forget(self, send: Send) -> None:
        del self._by_epoch[send.target.epoch]
        self._transport.forget(send.target.epoch)
