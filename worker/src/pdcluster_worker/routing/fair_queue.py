"""Fair queueing: the oldest request of the peer with the fewest tokens served since the queue was
empty.  A peer that joins late starts at the current level.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of a peer to send one named request."""

    peer: str
    request_id: str


@dataclass(frozen=True, slots=True)
class CreditRequest:
    grant: Grant
    tokens: int
    priority: int
    number: int  # of arrival, unique
    arrived_at: float  # seconds of the ledger's clock


class FairQueue:
    def __init__(self) -> None:
        self._claims: dict[str, dict[Grant, CreditRequest]] = {}
        self._served: dict[str, int] = {}
        self._level = 0  # tokens of the peer that was served last, before that
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, claim: CreditRequest) -> None:
        peer = claim.grant.peer
        if peer not in self._claims:
            self._claims[peer] = {}
            self._served[peer] = max(self._level, self._served.get(peer, 0))
        self._claims[peer][claim.grant] = claim
        self.num_requests += 1
        self.num_tokens += claim.tokens

    def discard(self, claim: CreditRequest) -> None:
        claims = self._claims[claim.grant.peer]
        del claims[claim.grant]
        if not claims:
            del self._claims[claim.grant.peer]
        self.num_requests -= 1
        self.num_tokens -= claim.tokens

    def serve(self, claim: CreditRequest) -> None:
        peer = claim.grant.peer
        self._level = self._served[peer]
        self._served[peer] += claim.tokens
        self.discard(claim)

    def refund(self, claim: CreditRequest) -> None:
        """Undo `serve` after the peer gave the grant back."""
        self._served[claim.grant.peer] -= claim.tokens

    def forget(self, peer: str) -> None:
        """Drop a peer that is gone and has no requests here."""
        self._served.pop(peer, None)

    def next(self) -> CreditRequest:
        """The queue must not be empty."""
        firsts = (next(iter(claims.values())) for claims in self._claims.values())
        return min(firsts, key=lambda claim: (self._served[claim.grant.peer], claim.number))

    def oldest(self) -> CreditRequest:
        """The queue must not be empty."""
        firsts = (next(iter(claims.values())) for claims in self._claims.values())
        return min(firsts, key=lambda claim: claim.number)
