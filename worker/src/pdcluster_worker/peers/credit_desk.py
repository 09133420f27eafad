"""The prefill side of the Credits streams: joins the ledger to the stream of each decode worker.

Every want is answered at once; a grant that comes later goes to the stream of
the peer that it names.  When a stream ends, the peer's wants and unused grants
end with it.  Who is granted is the ledger's rule (`routing.credits`).
"""

import asyncio
from collections.abc import Iterable

from pdcluster_worker.routing.credits import CreditLedger, Grant

Answers = asyncio.Queue[tuple[str, bool]]
"""(request id, granted) on their way to one peer."""


class CreditDesk:
    """One per worker.  A peer is named by the engine id of the decode worker."""

    def __init__(self, ledger: CreditLedger) -> None:
        self._ledger = ledger
        self._streams: dict[str, Answers] = {}

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

    def want(self, peer: str, request_id: str, tokens: int, priority: int) -> None:
        """Answer a want.  Raises ValueError for an impossible one."""
        self._answer(peer, request_id, self._ledger.want(peer, request_id, tokens, priority))

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
        """Tell each peer of its new grants."""
        for grant in grants:
            self._answer(grant.peer, grant.request_id, True)

    def _answer(self, peer: str, request_id: str, granted: bool) -> None:
        # Without a stream the peer has just gone, and `close` has dropped what it held.
        if (answers := self._streams.get(peer)) is not None:
            answers.put_nowait((request_id, granted))
