"""Index of the prompts in hand on a decode worker: whose KV its engines hold or compute, and whose
KV a prefill worker computes for them.

What an engine has in hand counts as cached by the next prompt that begins like it: the engine
computes a shared prefix once.  A prompt that begins like one on its way from a prefill worker
need not be computed there again, nor sent: it can wait for that one.  Pure: no clock, no waiting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coming:
    """A request whose KV is on its way, and how many leading blocks of a prompt it brings."""

    request_id: str
    num_blocks: int


@dataclass(slots=True)
class _Held:
    engine: str
    hashes: Sequence[bytes]
    priority: int
    is_here: bool


class PrefixesInHand:
    """Prompts of running requests by engine; hashes are of their full blocks, each of all before.

    >>> prefixes = PrefixesInHand()
    >>> prefixes.begin("r", "0", [b"a", b"b"], priority=0, is_here=False)
    >>> prefixes.here("0", [b"a", b"b", b"c"]), prefixes.coming("0", [b"a", b"c"], priority=0)
    (0, Coming(request_id='r', num_blocks=1))
    >>> prefixes.arrived("r")
    >>> prefixes.here("0", [b"a", b"b", b"c"]), prefixes.coming("0", [b"a", b"c"], priority=0)
    (2, None)
    >>> prefixes.ended("r")
    >>> prefixes.here("0", [b"a", b"b", b"c"])
    0
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._by_first_block: dict[tuple[str, bytes], dict[str, _Held]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def begin(
        self,
        request_id: str,
        engine: str,
        hashes: Sequence[bytes],
        *,
        priority: int,
        is_here: bool,
    ) -> None:
        """Add a prompt that is computed now.

        priority: lower is more urgent.  is_here: by that engine; else a prefill worker computes it.
        """
        if hashes:
            held = _Held(engine, hashes, priority, is_here)
            self._held[request_id] = held
            self._by_first_block.setdefault((engine, hashes[0]), {})[request_id] = held

    def arrived(self, request_id: str) -> None:
        """The engine has its KV, or computes it after all; an unknown id is a no-op."""
        if (held := self._held.get(request_id)) is not None:
            held.is_here = True

    def ended(self, request_id: str) -> None:
        """Forget a request; an unknown id is a no-op."""
        if (held := self._held.pop(request_id, None)) is not None:
            key = held.engine, held.hashes[0]
            del self._by_first_block[key][request_id]
            if not self._by_first_block[key]:
                del self._by_first_block[key]

    def here(self, engine: str, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that the engine holds or computes for running requests."""
        return max((num_blocks for _, num_blocks in self._longer(engine, hashes, True)), default=0)

    def coming(self, engine: str, hashes: Sequence[bytes], *, priority: int) -> Coming | None:
        """The request on its way that brings most leading blocks of a prompt, the first of equals.

        One that is less urgent than `priority` does not count: it may be long in coming.
        """
        found = None
        for request_id, num_blocks in self._longer(engine, hashes, False, priority):
            found = Coming(request_id, num_blocks)
        return found

    def _longer(
        self, engine: str, hashes: Sequence[bytes], is_here: bool, priority: int | None = None
    ) -> Iterator[tuple[str, int]]:
        """Requests that share more leading blocks with a prompt than any before them, and how
        many; each is compared from there on, so all together cost one walk over the prompt.
        """
        num_blocks = 0
        sharing = self._by_first_block.get((engine, hashes[0]), {}) if hashes else {}
        for request_id, held in sharing.items():
            if held.is_here is not is_here or (priority is not None and held.priority > priority):
                continue
            longer = _match(held.hashes, hashes, num_blocks)
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
