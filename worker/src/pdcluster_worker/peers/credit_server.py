"""The prefill side of credits: joins the ledger (`routing.credits`) to the stream of each decode
worker.
"""

import asyncio
from collections.abc import Iterable

from pdcluster_worker.routing.batching import Grant
from pdcluster_worker.routing.credits import CreditLedger

Answers = asyncio.Queue[tuple[str, bool]]
"""(request id, granted) on their way to one peer."""


class CreditServer:
    """A peer is named by the engine id of the decode worker."""

    def __init__(self, ledger: CreditLedger) -> None:
        self._ledger = ledger
        self._streams: dict[str, Answers] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, peer: str) -> Answers:
        """Begin a peer's stream: credits of an earlier one are void."""
        answers: Answers = asyncio.Queue()
        self._streams[peer] = answers
        self.push(self._ledger.drop_peer(peer))
        return answers

    def close(self, peer: str, answers: Answers) -> None:
        """A no-op when a later stream has taken its place."""
        if self._streams.get(peer) is answers:
            del self._streams[peer]
            self.push(self._ledger.drop_peer(peer))

    def claim(self, peer: str, request_id: str, tokens: int, priority: int) -> None:
        """Raises ValueError for an impossible one."""
        own = Grant(peer, request_id)
        granted = self._ledger.claim(peer, request_id, tokens, priority)
        self._answer(own, own in granted)
        self.push(grant for grant in granted if grant != own)

    def release(self, peer: str, request_id: str) -> None:
        self.push(self._ledger.release(peer, request_id))

    def start(self, peer: str, request_id: str) -> bool:
        """False when the peer has no credit for the request."""
        return self._ledger.start(peer, request_id)

    def finish(self, peer: str, request_id: str) -> None:
        """A second time is a no-op."""
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
