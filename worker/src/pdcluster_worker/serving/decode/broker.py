"""Late binding: a request goes to the first prefill worker with room, the best of several."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_schema.routing import PrefillScoreSpec
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


@dataclass(slots=True)
class _PendingCredit:
    request_id: str
    tokens: int
    priority: int
    hashes: Sequence[bytes]
    chosen: "asyncio.Future[Peer | None]"
    only: Peer | None = None
    # None: not answered, False: queued there, True: granted
    requested: dict[Peer, bool | None] = field(default_factory=dict)
    overdue: bool = False

    @property
    def taken(self) -> Peer | None:
        """The worker that was chosen; None = none is, or the request is waited for no more."""
        has_chosen = self.chosen.done() and not self.chosen.cancelled()
        return self.chosen.result() if has_chosen else None


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
        self._waits: dict[str, _PendingCredit] = {}
        self._tie = random.Random()

    async def acquire(
        self,
        request_id: str,
        tokens: int,
        priority: int,
        hashes: Sequence[bytes],
        *,
        only: Peer | None = None,
    ) -> Peer | None:
        """Wait for a credit for `tokens`; None when no prefill worker is left.

        The request must be in the queue, and stays there.  Cancelling gives everything back.
        """
        chosen: asyncio.Future[Peer | None] = asyncio.get_running_loop().create_future()
        wait = _PendingCredit(request_id, tokens, priority, hashes, chosen, only)
        self._waits[request_id] = wait
        try:
            self.request_credits()
            return await wait.chosen
        except asyncio.CancelledError:
            if (peer := wait.taken) is not None:
                peer.release(request_id)
            raise
        finally:
            del self._waits[request_id]
            self._give_back(wait)
            self.request_credits()

    def request_credits(self) -> None:
        """Request credits for the heads of the queue, from workers not asked yet."""
        ready = self._prefills()
        waits = (self._waits.get(request_id) for request_id in self._queue.heads(REQUESTING_HEADS))
        for wait in [wait for wait in waits if wait is not None and not wait.chosen.done()]:
            peers = [
                peer
                for peer in ready
                if wait.only in (None, peer) and takes_length(peer.max_model_len, wait.tokens)
            ]
            if not peers:
                self._choose(wait, None)
            for peer in peers:
                if peer not in wait.requested:
                    self._request_from(wait, peer)

    def on_credit(self, peer: Peer, request_id: str, granted: bool) -> None:
        """Take one answer of a prefill worker."""
        wait = self._waits.get(request_id)
        if wait is None or wait.chosen.done() or peer not in wait.requested:
            if granted and (wait is None or wait.taken is not peer):
                peer.release(request_id)
            return
        wait.requested[peer] = granted
        self._decide(wait)

    def on_change(self, peer: Peer) -> None:
        """Request what a worker that takes no new work has not granted from the others."""
        if not peer.ready:
            for wait in list(self._waits.values()):
                if peer in wait.requested and not wait.requested[peer]:
                    del wait.requested[peer]
                    peer.release(wait.request_id)
                    self._decide(wait)
        self.request_credits()

    def on_lost(self, peer: Peer) -> None:
        """Handle a broken stream to a prefill worker: its answers are void."""
        for wait in list(self._waits.values()):
            if wait.requested.pop(peer, None) is not None:
                self._decide(wait)
        self.request_credits()

    def _request_from(self, wait: _PendingCredit, peer: Peer) -> None:
        if not wait.requested:
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._on_overdue, wait)
        wait.requested[peer] = None
        peer.claim(wait.request_id, self._cost(wait, peer), wait.priority)

    def _cost(self, wait: _PendingCredit, peer: Peer) -> int:
        return max(1, wait.tokens - self._matched(wait, peer))

    def _matched(self, wait: _PendingCredit, peer: Peer) -> int:
        return min(wait.tokens, peer.prefix_match(wait.hashes) * self._block_size)

    def _on_overdue(self, wait: _PendingCredit) -> None:
        wait.overdue = True
        self._decide(wait)

    def _decide(self, wait: _PendingCredit) -> None:
        if wait.chosen.done() or (None in wait.requested.values() and not wait.overdue):
            return
        granted = {peer.key: peer for peer, answer in wait.requested.items() if answer}
        if granted:
            # A draining worker keeps its promise, but is not held up while another one has room.
            granted = {key: peer for key, peer in granted.items() if peer.ready} or granted
            candidates = [self._candidate(wait, peer) for peer in granted.values()]
            self._choose(wait, granted[choose_prefill(self._policy(), candidates, self._tie)])

    def _candidate(self, wait: _PendingCredit, peer: Peer) -> PrefillCandidate:
        seconds = self._transfer_seconds(peer.key, wait.tokens)
        matched = self._matched(wait, peer)
        return PrefillCandidate(peer.key, matched, peer.load.waiting_tokens, seconds)

    def _choose(self, wait: _PendingCredit, peer: Peer | None) -> None:
        if not wait.chosen.done():
            wait.chosen.set_result(peer)

    def _give_back(self, wait: _PendingCredit) -> None:
        for peer in wait.requested:
            if peer is not wait.taken:
                peer.release(wait.request_id)
