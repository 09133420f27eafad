"""The prefill side of the Credits streams: joins the ledger to the stream of each decode worker.

Every want is answered at once; a grant that comes later goes to the stream of
the peer that it names, and a group that waits for company when it is due.  When a stream ends, the
peer's wants and unused grants end with it.  The ledger chooses the grants (`routing.credits`).
"""

import asyncio
from collections.abc import Iterable

from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.fair_queue import Grant

Answers = asyncio.Queue[tuple[str, bool]]
"""(request id, granted) on their way to one peer."""


class CreditServer:
    """One per worker.  A peer is named by the engine id of the decode worker."""

    def __init__(self, ledger: CreditLedger) -> None:
        self._ledger = ledger
        self._streams: dict[str, Answers] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, peer: str) -> Answers:
        """A peer's stream begins; what it held by an earlier one is void."""
        answers: Answers = asyncio.Queue()
        self._streams[peer] = answers
        self.push(self._ledger.drop_peer(peer))
        return answers

    def close(self, peer: str, answers: Answers) -> None:
        """A peer's stream ended; no-op when a later one has taken its place."""
        if self._streams.get(peer) is answers:
            del self._streams[peer]
            self.push(self._ledger.drop_peer(peer))

    def claim(self, peer: str, request_id: str, tokens: int, priority: int) -> None:
        """Answer a want.  Raises ValueError for an impossible one."""
        own = Grant(peer, request_id)
        granted = self._ledger.claim(peer, request_id, tokens, priority)
        self._answer(own, own in granted)
        self.push(grant for grant in granted if grant != own)

    def release(self, peer: str, request_id: str) -> None:
        """A want or a grant is no longer needed."""
        self.push(self._ledger.release(peer, request_id))

    def start(self, peer: str, request_id: str) -> bool:
        """The granted request arrived.  False when the peer has no grant for it."""
        return self._ledger.start(peer, request_id)

    def finish(self, peer: str, request_id: str) -> None:
        """Its work is done, or has failed; a second time is a no-op."""
        self.push(self._ledger.finish(peer, request_id))

    def push(self, grants: Iterable[Grant]) -> None:
        """Send each peer its new grants, and return when the next group is due."""
        for grant in grants:
            self._answer(grant, True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._ledger.due) is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._on_due)

    def _on_due(self) -> None:
        self._timer = None
        self.push(self._ledger.grant_due())

    def _answer(self, grant: Grant, granted: bool) -> None:
        # Without a stream the peer has just gone, and `close` has dropped what it held.
        if (answers := self._streams.get(grant.peer)) is not None:
            answers.put_nowait((grant.request_id, granted))
