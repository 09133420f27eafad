"""Index of prompts in flight on a decode worker: computed by its engines or by a prefill worker."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

MOST_WAIT_SECONDS = 10.0  # the other request may be behind many

LONGEST_RATIO = 2  # of a prompt longer by this factor most time goes to its own tokens


@dataclass(frozen=True, slots=True)
class InflightPrefix:
    """A request whose KV is in transfer, and the leading blocks of a prompt that it brings."""

    request_id: str
    num_blocks: int


@dataclass(slots=True)
class _HeldPrefix:
    engine: str
    hashes: Sequence[bytes]
    priority: int
    is_local: bool


class InflightPrefixIndex:
    """By engine.  Hashes are of full blocks, each chained to all before it."""

    def __init__(self) -> None:
        self._held: dict[str, _HeldPrefix] = {}
        self._by_first_block: dict[tuple[str, bytes], dict[str, _HeldPrefix]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def begin(
        self,
        request_id: str,
        engine: str,
        hashes: Sequence[bytes],
        *,
        priority: int,
        is_local: bool,
    ) -> None:
        """is_local: computed by the engine, not a prefill worker.  Low priority is more urgent."""
        if hashes:
            held = _HeldPrefix(engine, hashes, priority, is_local)
            self._held[request_id] = held
            self._by_first_block.setdefault((engine, hashes[0]), {})[request_id] = held

    def arrived(self, request_id: str) -> None:
        """The engine has its KV, or computes it after all; an unknown id is a no-op."""
        if (held := self._held.get(request_id)) is not None:
            held.is_local = True

    def ended(self, request_id: str) -> None:
        if (held := self._held.pop(request_id, None)) is not None:
            key = held.engine, held.hashes[0]
            del self._by_first_block[key][request_id]
            if not self._by_first_block[key]:
                del self._by_first_block[key]

    def local(self, engine: str, hashes: Sequence[bytes], *, priority: int) -> int:
        """Leading blocks that the engine holds or computes for requests at least as urgent."""
        held = self._sharing(engine, hashes, priority, is_local=True)
        return max((num_blocks for _, num_blocks in _longer(held, hashes)), default=0)

    def coming(
        self, engine: str, hashes: Sequence[bytes], *, priority: int
    ) -> InflightPrefix | None:
        """The request in transfer with most leading blocks; not much longer or less urgent."""
        found = None
        most = LONGEST_RATIO * len(hashes)
        held = [
            (request_id, blocks)
            for request_id, blocks in self._sharing(engine, hashes, priority, is_local=False)
            if len(blocks) <= most
        ]
        for request_id, num_blocks in _longer(held, hashes):
            found = InflightPrefix(request_id, num_blocks)
        return found

    def _sharing(
        self, engine: str, hashes: Sequence[bytes], priority: int, *, is_local: bool
    ) -> list[tuple[str, Sequence[bytes]]]:
        held = self._by_first_block.get((engine, hashes[0]), {}) if hashes else {}
        return [
            (request_id, each.hashes)
            for request_id, each in held.items()
            if each.is_local is is_local and each.priority <= priority
        ]


def longest_wait(*limits: float | None) -> float:
    """Seconds that a prompt waits at most, so that each of its deadlines has half left.

    >>> longest_wait(None, None), longest_wait(0.5, 60.0)
    (10.0, 0.25)
    """
    return min(MOST_WAIT_SECONDS, *(limit / 2 for limit in limits if limit is not None), inf)


def _longer(
    held: Iterable[tuple[str, Sequence[bytes]]], hashes: Sequence[bytes]
) -> Iterator[tuple[str, int]]:
    """Requests that share more leading blocks than any before them, in one walk over the prompt."""
    num_blocks = 0
    for request_id, blocks in held:
        longer = _match(blocks, hashes, num_blocks)
        if longer > num_blocks:
            num_blocks = longer
            yield request_id, num_blocks


def _match(held: Sequence[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
    """Leading blocks that both share, at least `num_blocks`.

    >>> _match([b"a", b"b", b"c"], [b"a", b"b", b"d"], 1), _match([b"x"], [b"a", b"b"], 1)
    (2, 1)
    """
    most = min(len(held), len(hashes))
    while num_blocks < most and held[num_blocks] == hashes[num_blocks]:
        num_blocks += 1
    return num_blocks
