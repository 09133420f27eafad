"""Port of the tiers below the block pool: blocks are copied by threads that the engine never waits
for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

POOL = -1
"""The block pool, as a place below which the tiers are counted from 0."""


class BlockPlace(NamedTuple):
    """tier: its number, or `POOL`; slot: there, or a block of the pool."""

    tier: int
    slot: int


class BlockCopy(NamedTuple):
    """A block to be copied: one of its two places is in a tier.  key: its hash."""

    copy_id: int
    key: bytes
    source: BlockPlace
    target: BlockPlace


CopyOutcome = Literal["copied", "damaged", "absent", "failed", "cancelled"]
"""damaged: the source does not hold the block whole; absent: a shared store no longer has it;
failed: the target takes no more, or the source does not answer.
"""


class BlockCopied(NamedTuple):
    """Neither place is read or written for this copy any more."""

    copy_id: int
    outcome: CopyOutcome
    seconds: float = 0.0
    reason: str = ""  # of a failure, in words for a log and a metric


class BlockLookup(NamedTuple):
    """Ask a shared store for the first keys that it does not have."""

    lookup_id: int
    tier: int
    keys: Sequence[bytes]


class BlocksFound(NamedTuple):
    lookup_id: int
    num_found: int  # keys before the first that the store does not have
    seconds: float = 0.0
    reason: str = ""  # why it did not answer; empty = it did


TierAnswer = BlockCopied | BlocksFound


@dataclass(frozen=True, slots=True)
class TierFacts:
    """store: identity of a store that other workers share, whose slots are only those blocks of it
    that this engine knows of; empty = the tier is this engine's own.
    """

    name: str
    num_slots: int
    stored: Sequence[tuple[int, bytes]] = ()  # slots from an earlier run, least recent first
    store: str = ""


class KVTierIO(Protocol):
    """Copies blocks between the pool and the tiers below it, in threads of its own."""

    @property
    def tiers(self) -> Sequence[TierFacts]:
        """The tiers, the fastest first."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Queue copies; each is answered once.  The caller keeps both places until then."""

    def cancel(self, copy_ids: Sequence[int]) -> None:
        """Skip those that have not begun; they are answered too."""

    def look_up(self, lookup: BlockLookup) -> None:
        """Answered once, however late."""

    def poll(self) -> list[TierAnswer]:
        """Answers since the last call; never waits."""

    def close(self) -> None:
        """Stop all threads; outstanding copies are abandoned."""


class NoTiers:
    """A KVTierIO without any."""

    tiers: Sequence[TierFacts] = ()
    block_bytes = 0

    def start(self, copies: Sequence[BlockCopy]) -> None:
        """Never called with any."""

    def cancel(self, copy_ids: Sequence[int]) -> None:
        """Never called with any."""

    def look_up(self, lookup: BlockLookup) -> None:
        """Never called."""

    def poll(self) -> list[TierAnswer]:
        return []

    def close(self) -> None:
        """Nothing runs."""


NO_TIERS = NoTiers()
