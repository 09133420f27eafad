"""Late binding: a request goes to the first prefill worker with room, the best of several."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pdcluster_schema.routing import PrefillScoreSpec
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.offload import takes_length
from pdcluster_worker.routing.prefill_choice import (
    REQUESTING_HEADS,
    CreditQueue,
    PrefillCandidate,
    choose_prefill,
)

ANSWER_SECONDS = 0.05
"""Longest wait of a choice for the slowest answer; a round trip takes about a millisecond, so this
bounds a stuck peer.
"""


def may_prefill(peer: Peer, spec: RequestSpec) -> bool:
    """Return whether it takes prompts of that length, and has the very adapter."""
    fits = takes_length(peer.max_model_len, spec.num_tokens)
    return fits and spec.runs_with(peer.load.adapters)


@dataclass(slots=True)
class _PendingCredit:
    spec: RequestSpec
    hashes: Sequence[bytes]
    only: Peer | None
    chosen: "asyncio.Future[Peer | None]"
    # None: not answered, False: queued there, True: granted
    requested: dict[Peer, bool | None] = field(default_factory=dict)
    overdue: bool = False

    @property
    def taken(self) -> Peer | None:
        """The worker that was chosen; None = none is, or the request is waited for no more."""
        has_chosen = self.chosen.done() and not self.chosen.cancelled()
        return self.chosen.result() if has_chosen else None

    def choose(self, peer: Peer | None) -> None:
        if not self.chosen.done():
            self.chosen.set_result(peer)


class CreditBroker:
    """The decode side of credits.  transfer_seconds: (worker's key, tokens); 0 = unknown."""

    def __init__(
        self,
        queue: CreditQueue,
        prefills: Callable[[], list[Peer]],
        policy: Callable[[], PrefillScoreSpec],
        block_size: int,
        transfer_seconds: Callable[[str, int], float] = lambda key, num_tokens: 0.0,
    ) -> None:
        self._queue = queue
        self._prefills = prefills
        self._policy = policy
        self._block_size = block_size
        self._transfer_seconds = transfer_seconds
        self._pending: dict[str, _PendingCredit] = {}
        self._tie = random.Random()

    @contextmanager
    def queued(self, spec: RequestSpec, only: Peer | None = None) -> Iterator[None]:
        """Keep a request in the queue, visibly, while it waits for credits and blocks."""
        named = "" if only is None else only.key
        self._queue.add(spec.request_id, spec.num_tokens, spec.priority, named)
        try:
            yield
        finally:
            self._queue.discard(spec.request_id)
            self.request_credits()

    async def acquire(
        self, spec: RequestSpec, hashes: Sequence[bytes], only: Peer | None = None
    ) -> Peer | None:
        """Wait for a credit for a queued request; None when no prefill worker is left.

        The request must be `queued`, and stays so.  Cancelling gives everything back.
        """
        pending = _PendingCredit(spec, hashes, only, asyncio.get_running_loop().create_future())
        self._pending[spec.request_id] = pending
        try:
            self.request_credits()
            return await pending.chosen
        except asyncio.CancelledError:
            if (peer := pending.taken) is not None:
                peer.release(spec.request_id)
            raise
        finally:
            del self._pending[spec.request_id]
            for peer in pending.requested:
                if peer is not pending.taken:
                    peer.release(spec.request_id)
            self.request_credits()

    def request_credits(self) -> None:
        """Request credits for the heads of the queue, from workers not asked yet."""
        ready = self._prefills()
        found = (
            self._pending.get(request_id) for request_id in self._queue.heads(REQUESTING_HEADS)
        )
        for pending in [
            pending for pending in found if pending is not None and not pending.chosen.done()
        ]:
            peers = [
                peer
                for peer in ready
                if pending.only in (None, peer) and may_prefill(peer, pending.spec)
            ]
            if not peers:
                pending.choose(None)
            for peer in peers:
                if peer not in pending.requested:
                    self._request_from(pending, peer)

    def on_credit(self, peer: Peer, request_id: str, granted: bool) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.chosen.done() or peer not in pending.requested:
            if granted and (pending is None or pending.taken is not peer):
                peer.release(request_id)
            return
        pending.requested[peer] = granted
        self._decide(pending)

    def on_change(self, peer: Peer) -> None:
        """Request what a worker that takes no new work has not granted from the others."""
        if not peer.ready:
            for pending in list(self._pending.values()):
                if peer in pending.requested and not pending.requested[peer]:
                    del pending.requested[peer]
                    peer.release(pending.spec.request_id)
                    self._decide(pending)
        self.request_credits()

    def on_lost(self, peer: Peer) -> None:
        for pending in list(self._pending.values()):
            if pending.requested.pop(peer, None) is not None:
                self._decide(pending)
        self.request_credits()

    def _request_from(self, pending: _PendingCredit, peer: Peer) -> None:
        if not pending.requested:
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._on_overdue, pending)
        pending.requested[peer] = None
        spec, cost = pending.spec, pending.spec.num_tokens - self._matched(pending, peer)
        peer.claim(spec.request_id, max(1, cost), spec.priority)

    def _matched(self, pending: _PendingCredit, peer: Peer) -> int:
        return min(pending.spec.num_tokens, peer.prefix_match(pending.hashes) * self._block_size)

    def _on_overdue(self, pending: _PendingCredit) -> None:
        pending.overdue = True
        self._decide(pending)

    def _decide(self, pending: _PendingCredit) -> None:
        if pending.chosen.done() or (None in pending.requested.values() and not pending.overdue):
            return
        granted = {peer.key: peer for peer, answer in pending.requested.items() if answer}
        if granted:
            # A draining worker keeps its promise, but is not held up while another one has room.
            granted = {key: peer for key, peer in granted.items() if peer.ready} or granted
            candidates = [self._candidate(pending, peer) for peer in granted.values()]
            pending.choose(granted[choose_prefill(self._policy(), candidates, self._tie)])

    def _candidate(self, pending: _PendingCredit, peer: Peer) -> PrefillCandidate:
        seconds = self._transfer_seconds(peer.key, pending.spec.num_tokens)
        matched = self._matched(pending, peer)
        return PrefillCandidate(peer.key, matched, peer.load.waiting_tokens, seconds)
