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
class Want:
    """A request that waits for a grant.

    number:     of its arrival, unique.
    arrived_at: in seconds of the ledger's clock.
    """

    grant: Grant
    tokens: int
    priority: int
    number: int
    arrived_at: float


class FairLine:
    """Wants that may be granted in any order among peers, and by arrival within a peer."""

    def __init__(self) -> None:
        self._wants: dict[str, dict[Grant, Want]] = {}
        self._served: dict[str, int] = {}
        self._level = 0  # what the peer that was served last had been served before
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, want: Want) -> None:
        """Put a want at the end of its peer's."""
        peer = want.grant.peer
        if peer not in self._wants:
            self._wants[peer] = {}
            self._served[peer] = max(self._level, self._served.get(peer, 0))
        self._wants[peer][want.grant] = want
        self.num_requests += 1
        self.num_tokens += want.tokens

    def discard(self, want: Want) -> None:
        """Take a want of this line out, unserved."""
        wants = self._wants[want.grant.peer]
        del wants[want.grant]
        if not wants:
            del self._wants[want.grant.peer]
        self.num_requests -= 1
        self.num_tokens -= want.tokens

    def serve(self, want: Want) -> None:
        """Take a want out, and count it for its peer."""
        peer = want.grant.peer
        self._level = self._served[peer]
        self._served[peer] += want.tokens
        self.discard(want)

    def refund(self, want: Want) -> None:
        """A served want came to nothing: its peer gave the grant back."""
        self._served[want.grant.peer] -= want.tokens

    def forget(self, peer: str) -> None:
        """A peer without wants is gone for good."""
        self._served.pop(peer, None)

    def next(self) -> Want:
        """The want whose turn it is; the line must not be empty."""
        firsts = (next(iter(wants.values())) for wants in self._wants.values())
        return min(firsts, key=lambda want: (self._served[want.grant.peer], want.number))

    def oldest(self) -> Want:
        """The want that has waited longest; the line must not be empty."""
        firsts = (next(iter(wants.values())) for wants in self._wants.values())
        return min(firsts, key=lambda want: want.number)
