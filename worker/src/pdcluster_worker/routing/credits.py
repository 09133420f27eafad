"""The prefill side's ledger of credits: how many tokens of work it has promised, and to whom.

A request of a peer goes want -> unused grant -> work in hand -> gone.  The head
of the (priority, arrival) line is granted while outstanding tokens (unused
grants and work in hand) stay within the limit; with nothing outstanding it is
granted whatever its size, so a prompt over the limit goes alone.  Nothing
overtakes the head, so no want starves behind smaller ones of its priority.
The ledger does not know how a grant reaches the peer: its caller sends those
that a call returns.
"""

from dataclasses import dataclass

from pdcluster_worker.routing.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of one peer to send one named request."""

    peer: str
    request_id: str


class CreditLedger:
    """Grants credits in tokens; `limit_tokens` is about one batch ahead of the engine."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._is_stopped = False
        self._wants: WaitingQueue[Grant] = WaitingQueue()
        self._unused: dict[Grant, int] = {}
        self._in_hand: dict[Grant, int] = {}

    def want(self, peer: str, request_id: str, tokens: int, priority: int) -> bool:
        """Ask for a credit: True is granted at once, False is queued.

        A repeated want answers its present state and changes nothing.
        Raises ValueError when `tokens` is not positive: the peer is at fault.
        """
        if tokens < 1:
            raise ValueError(f"request {request_id} of peer {peer} wants {tokens} tokens: a want is for at least 1")
        grant = Grant(peer, request_id)
        if grant in self._unused or grant in self._in_hand:
            return True
        self._wants.add(grant, tokens, priority)
        return grant in self._grant_heads()

    def release(self, peer: str, request_id: str) -> list[Grant]:
        """Give back a want or an unused grant; returns who is granted in its place.  Work in hand and unknown ids stay as they are."""
        grant = Grant(peer, request_id)
        self._wants.discard(grant)
        self._unused.pop(grant, None)
        return self._grant_heads()

    def start(self, peer: str, request_id: str) -> bool:
        """The granted request arrived: its grant becomes work in hand.  False without such a grant; the caller refuses the request."""
        grant = Grant(peer, request_id)
        if grant not in self._unused:
            return False
        self._in_hand[grant] = self._unused.pop(grant)
        return True

    def finish(self, peer: str, request_id: str) -> list[Grant]:
        """Work in hand is computed, or failed: its tokens return.  Returns who is granted now; unknown ids are a no-op."""
        self._in_hand.pop(Grant(peer, request_id), None)
        return self._grant_heads()

    def drop_peer(self, peer: str) -> list[Grant]:
        """The pair broke: the peer's wants and unused grants go, its work in hand stays until `finish`."""
        for grant in self._wants.heads(self._wants.num_requests):
            if grant.peer == peer:
                self._wants.discard(grant)
        self._unused = {grant: tokens for grant, tokens in self._unused.items() if grant.peer != peer}
        return self._grant_heads()

    def set_limit(self, limit_tokens: int) -> list[Grant]:
        """Take a new limit.  A lower one takes no grant back; it is reached as work finishes."""
        self._limit_tokens = limit_tokens
        return self._grant_heads()

    def stop(self) -> None:
        """Grant nothing more (drain): wants are answered queued, grants that are out stay good."""
        self._is_stopped = True

    def resume(self) -> list[Grant]:
        """Grant again after `stop`."""
        self._is_stopped = False
        return self._grant_heads()

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of unused grants and of work in hand."""
        return sum(self._unused.values()) + sum(self._in_hand.values())

    @property
    def unused_grants(self) -> int:
        """Grants whose requests have not arrived."""
        return len(self._unused)

    @property
    def queued_requests(self) -> int:
        """Wants not granted yet."""
        return self._wants.num_requests

    @property
    def queued_tokens(self) -> int:
        """Tokens of the wants not granted yet."""
        return self._wants.num_tokens

    def _grant_heads(self) -> list[Grant]:
        granted: list[Grant] = []
        outstanding = self.outstanding_tokens
        while self._wants.num_requests and not self._is_stopped:
            head = self._wants.heads(1)[0]
            tokens = self._wants.tokens(head)
            if outstanding > 0 and outstanding + tokens > self._limit_tokens:
                break
            self._wants.discard(head)
            self._unused[head] = tokens
            outstanding += tokens
            granted.append(head)
        return granted
