"""Index of the prompts in hand on a decode worker: whose KV its engines hold or compute, and whose
KV a prefill worker computes for them.

What an engine has in hand counts as cached by the next prompt that begins like it: it finds
those blocks when its turn comes, unless one step computes both.  A prompt that begins like one
on its way from a prefill worker need not be computed there again, nor sent: it can wait for that
one.  Pure: no clock, no waiting.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

MOST_WAIT_SECONDS = 10.0
"""Longest wait for what another request brings: it may be behind many."""

LONGEST_RATIO = 2
"""A prompt so many times as long is not waited for: most of its time is for its own tokens."""


@dataclass(frozen=True, slots=True)
class InflightPrefix:
    """A request whose KV is on its way, and how many leading blocks of a prompt it brings."""

    request_id: str
    num_blocks: int


@dataclass(slots=True)
class _HeldPrefix:
    engine: str
    hashes: Sequence[bytes]
    priority: int
    is_local: bool


class InflightPrefixIndex:
    """Prompts of running requests by engine; hashes are of their full blocks, each of all before.

    >>> prefixes = InflightPrefixIndex()
    >>> prefixes.begin("r", "0", [b"a", b"b"], priority=0, is_local=False)
    >>> prompt = [b"a", b"b", b"c"]
    >>> prefixes.local("0", prompt, priority=0), prefixes.coming("0", [b"a", b"c"], priority=0)
    (0, InflightPrefix(request_id='r', num_blocks=1))
    >>> prefixes.arrived("r")
    >>> prefixes.local("0", prompt, priority=0), prefixes.coming("0", [b"a", b"c"], priority=0)
    (2, None)
    >>> prefixes.ended("r")
    >>> prefixes.local("0", prompt, priority=0)
    0
    """

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
        """Add a prompt that is computed now.

        priority: lower is more urgent.  is_here: by that engine; else a prefill worker computes it.
        """
        if hashes:
            held = _HeldPrefix(engine, hashes, priority, is_local)
            self._held[request_id] = held
            self._by_first_block.setdefault((engine, hashes[0]), {})[request_id] = held

    def arrived(self, request_id: str) -> None:
        """The engine has its KV, or computes it after all; an unknown id is a no-op."""
        if (held := self._held.get(request_id)) is not None:
            held.is_local = True

    def ended(self, request_id: str) -> None:
        """Forget a request; an unknown id is a no-op."""
        if (held := self._held.pop(request_id, None)) is not None:
            key = held.engine, held.hashes[0]
            del self._by_first_block[key][request_id]
            if not self._by_first_block[key]:
                del self._by_first_block[key]

    def local(self, engine: str, hashes: Sequence[bytes], *, priority: int) -> int:
        """Leading blocks of a prompt that the engine holds or computes for running requests.

        One that is less urgent than `priority` does not count: the engine may begin it later.
        """
        held = self._sharing(engine, hashes, priority, is_local=True)
        return max((num_blocks for _, num_blocks in _longer(held, hashes)), default=0)

    def coming(
        self, engine: str, hashes: Sequence[bytes], *, priority: int
    ) -> InflightPrefix | None:
        """The request on its way that brings most leading blocks of a prompt, the first of equals.

        One that is less urgent than `priority`, or much longer, may be long in coming, and does not
        count.
        """
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
        """Requests that begin with the same block, and their blocks."""
        held = self._by_first_block.get((engine, hashes[0]), {}) if hashes else {}
        return [
            (request_id, each.hashes)
            for request_id, each in held.items()
            if each.is_local is is_local and each.priority <= priority
        ]


def longest_wait(*limits: float | None) -> float:
    """Seconds that a prompt waits at most, so that each of its times still has half left.

    limits: seconds of its deadlines; None = it has none.

    >>> longest_wait(None, None), longest_wait(0.5, 60.0)
    (10.0, 0.25)
    """
    return min(MOST_WAIT_SECONDS, *(limit / 2 for limit in limits if limit is not None), inf)


def _longer(
    held: Iterable[tuple[str, Sequence[bytes]]], hashes: Sequence[bytes]
) -> Iterator[tuple[str, int]]:
    """Requests that share more leading blocks with a prompt than any before them, and how many;
    each is compared from there on, so all together cost one walk over the prompt.
    """
    num_blocks = 0
    for request_id, blocks in held:
        longer = _match(blocks, hashes, num_blocks)
        if longer > num_blocks:
            num_blocks = longer
            yield request_id, num_blocks


def _match(held: Sequence[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
    """Leading blocks that both share, or `num_blocks` where they are no more than that.

    >>> _match([b"a", b"b", b"c"], [b"a", b"b", b"d"], 1), _match([b"x"], [b"a", b"b"], 1)
    (2, 1)
    """
    most = min(len(held), len(hashes))
    while num_blocks < most and held[num_blocks] == hashes[num_blocks]:
        num_blocks += 1
    return num_blocks
