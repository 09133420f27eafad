"""A line of wants in which each peer has its share, whatever the others ask for.

The next is the first want of the peer that has been served least, in tokens,
since the line was last empty; equals by arrival.  A peer that joins late, or
comes back, starts where the line is: it neither makes up for the past nor
waits for it.  With one peer it is first come, first served.  Pure.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of one peer to send one named request."""

    peer: str
    request_id: str


@dataclass(frozen=True, slots=True)
class CreditRequest:
    """A request that waits for a grant.

    number:     of its arrival, unique.
    arrived_at: in seconds of the ledger's clock.
    """

    grant: Grant
    tokens: int
    priority: int
    number: int
    arrived_at: float


class FairQueue:
    """Wants that may be granted in any order among peers, and by arrival within a peer."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[Grant, CreditRequest]] = {}
        self._served: dict[str, int] = {}
        self._level = 0  # what the peer that was served last had been served before
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, claim: CreditRequest) -> None:
        """Put a want at the end of its peer's."""
        peer = claim.grant.peer
        if peer not in self._claims:
            self._claims[peer] = {}
            self._served[peer] = max(self._level, self._served.get(peer, 0))
        self._claims[peer][claim.grant] = claim
        self.num_requests += 1
        self.num_tokens += claim.tokens

    def discard(self, claim: CreditRequest) -> None:
        """Take a want of this line out, unserved."""
        claims = self._claims[claim.grant.peer]
        del claims[claim.grant]
        if not claims:
            del self._claims[claim.grant.peer]
        self.num_requests -= 1
        self.num_tokens -= claim.tokens

    def serve(self, claim: CreditRequest) -> None:
        """Take a want out, and count it for its peer."""
        peer = claim.grant.peer
        self._level = self._served[peer]
        self._served[peer] += claim.tokens
        self.discard(claim)

    def refund(self, claim: CreditRequest) -> None:
        """A served want came to nothing: its peer gave the grant back."""
        self._served[claim.grant.peer] -= claim.tokens

    def forget(self, peer: str) -> None:
        """A peer without wants is gone for good."""
        self._served.pop(peer, None)

    def next(self) -> CreditRequest:
        """The want whose turn it is; the line must not be empty."""
        firsts = (next(iter(claims.values())) for claims in self._claims.values())
        return min(firsts, key=lambda claim: (self._served[claim.grant.peer], claim.number))

    def oldest(self) -> CreditRequest:
        """The want that has waited longest; the line must not be empty."""
        firsts = (next(iter(claims.values())) for claims in self._claims.values())
        return min(firsts, key=lambda claim: claim.number)
