"""A model for tests of the engine, whose answers can be worked out by hand.

FakeRunner keeps one number per slot as its "KV" and derives every token from
what is stored, so a missing, stale or foreign block changes the answer:

    kv(token, position) = (token + 1) * (position + 1)
    next token          = (weight * sum of kv over all slots so far + number of tokens) % vocab_size

Prompt [3, 5], weight 1, vocabulary 100: kv = 4*1, 6*2; next = (16 + 2) % 100 = 18.
Then [3, 5, 18]: kv of the last = 19*3; next = (16 + 57 + 3) % 100 = 76.
"""

from collections.abc import Callable, Mapping, Sequence

from pdcluster_worker.engine.in_flight import verified
from pdcluster_worker.engine.ports import GrammarCounts, RowOutcome, Sample, StepSeconds
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.errors import RequestError

SLOT_BYTES = 8


class FakeRunner:
    """A ModelRunner and KVMemory; the module's docstring works out its tokens.

    window:       tokens that a token sees, itself included; block `num_blocks` is the null block.
    failing:      request id -> what `wait` raises for a batch with that request.
    failing_rows: request id -> outcome of its row.
    executed:     (request id, number of tokens) of each batch.
    With depth 2 a batch is computed in `wait`, after any wrong reuse of its blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        weight: int = 1,
        *,
        window: int | None = None,
        depth: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = self.head_bytes = block_size * SLOT_BYTES
        self.heads = range(1)
        self.failing: dict[str, Exception] = {}
        self.failing_rows: dict[str, RequestError] = {}
        self.seconds = StepSeconds()
        self.on_write: Callable[[int], None] = lambda block_id: None
        self.on_execute: Callable[[], None] = lambda: None
        self.executed: list[list[tuple[str, int]]] = []
        self.forgotten: list[str] = []
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._weight = weight
        self._window = window
        self._bytes = memoryview(bytearray((num_blocks + 1) * self.block_bytes))
        self._slots = self._bytes.cast("q")
        self._begun: Batch | None = None
        self.depth = depth
        self.grammars = FakeGrammars()
        self.adapters = None

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def begin(self, prepared: Batch, sampled: Mapping[EngineRequest, int]) -> None:
        assert self._begun is None, "a batch begins before the one before has ended"
        self._begun = prepared

    def wait(self, prepared: Batch) -> list[RowOutcome]:
        assert self._begun is prepared, "a batch is waited for that has not begun"
        self._begun = None
        return self._execute(prepared)

    def _execute(self, batch: Batch) -> list[RowOutcome]:
        self.on_execute()
        self.executed.append([(item.request.request_id, item.num_tokens) for item in batch.items])
        for item in batch.items:
            if (error := self.failing.get(item.request.request_id)) is not None:
                raise error
        outcomes: list[RowOutcome] = []
        for item in batch.items:
            tokens, block_table = item.request.tokens, item.request.block_table
            assert item.num_tokens > 0, "a model computes at least one token"
            known = [*tokens[: item.start + item.num_known_tokens], *item.drafts]
            for position in range(item.start, item.end):
                first_seen = block_table[self._first(position) // self._block_size]
                assert first_seen < self.num_blocks, "a token sees the null block"
                self.on_write(block_table[position // self._block_size])
                self._slots[self._slot(block_table, position)] = _kv(
                    known[position] if position < len(known) else 0, position
                )
            outcomes.append(self._outcome(item))
        return outcomes

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        return self.block(block_id)

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        pass

    def reference(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens by recursion over the formula, without blocks."""
        known = list(tokens)
        for _ in range(count):
            total = sum(
                _kv(known[position], position)
                for position in range(self._first(len(known) - 1), len(known))
            )
            known.append((self._weight * total + len(known)) % self._vocab_size)
        return known[len(tokens) :]

    def _outcome(self, item: Scheduled) -> RowOutcome:
        request = item.request
        if request.request_id in self.failing_rows or not item.samples:
            return self.failing_rows.get(request.request_id)
        ends = range(item.end - len(item.drafts), item.end + 1)
        return verified(
            item.drafts, [Sample(self._next_token(request.block_table, end)) for end in ends]
        )

    def _first(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _slot(self, block_table: list[int], position: int) -> int:
        return (
            block_table[position // self._block_size] * self._block_size
            + position % self._block_size
        )

    def _next_token(self, block_table: list[int], num_tokens: int) -> int:
        seen = range(self._first(num_tokens - 1), num_tokens)
        total = sum(self._slots[self._slot(block_table, position)] for position in seen)
        return (self._weight * total + num_tokens) % self._vocab_size


def _kv(token: int, position: int) -> int:
    return (token + 1) * (position + 1)


class FakeGrammars:
    """compiled: texts that are; wrong: errors of others.
    begun:    texts of requests, in order.
    """

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.wrong: dict[str, RequestError] = {}
        self.begun: list[str] = []

    def begin(self, request: EngineRequest) -> None:
        self.begun.append(_text_of(request))

    def open(self, request: EngineRequest) -> bool | RequestError:
        text = _text_of(request)
        return self.wrong.get(text, text in self.compiled)

    def take_counts(self) -> GrammarCounts:
        return GrammarCounts()


def _text_of(request: EngineRequest) -> str:
    assert request.sampling.constraint is not None
    return request.sampling.constraint.text
