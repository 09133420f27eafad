"""Stand-ins for the model, the network and the clock, for tests of the engine; exact, and small enough to check by hand.

FakeRunner keeps one number per slot as its "KV" and derives every token from
what is stored, so a missing, stale or foreign block changes the answer:

    kv(token, position) = (token + 1) * (position + 1)
    next token          = (weight * sum of kv over all slots so far + number of tokens) % vocab_size

Prompt [3, 5], weight 1, vocabulary 100: kv = 4*1, 6*2; next = (16 + 2) % 100 = 18.
Then [3, 5, 18]: kv of the last = 19*3; next = (16 + 57 + 3) % 100 = 76.

FakeNetwork moves one block at a time, at a call; it reads a source block at
that moment, and until a fence or a cancel is answered it may still read and
write: the worst that `engine.ports.Transport` allows.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.ports import (
    BlocksSent,
    Fenced,
    GrammarCounts,
    KVMemory,
    RowOutcome,
    Sample,
    SendEnded,
    StepSeconds,
    TransferEvent,
    verified,
)
from pdcluster_worker.engine.request import Request
from pdcluster_worker.errors import RequestError

SLOT_BYTES = 8


class FakeClock:
    """A clock that moves only when it is moved; seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class FakeGrammars:
    """An `engine.ports.Grammars` that compiles at a call.

    compiled: texts that are; wrong: why others cannot be.  begun: texts, in order, of the requests that asked.
    """

    def __init__(self) -> None:
        self.compiled: set[str] = set()
        self.wrong: dict[str, RequestError] = {}
        self.begun: list[str] = []

    def begin(self, request: Request) -> None:
        """See ports.Grammars."""
        self.begun.append(_text_of(request))

    def open(self, request: Request) -> bool | RequestError:
        """See ports.Grammars."""
        text = _text_of(request)
        return self.wrong.get(text, text in self.compiled)

    def take_counts(self) -> GrammarCounts:
        """See ports.Grammars."""
        return GrammarCounts()


def _text_of(request: Request) -> str:
    assert request.sampling.constraint is not None
    return request.sampling.constraint.text


class FakeRunner:
    """A ModelRunner and KVMemory whose answers are worked out in this module's docstring.

    window:     positions that a token sees, itself included; `num_blocks` is the null block.  None = all.
    grammars:   of requests with a constraint, of which nothing else is looked at here.
    failing:    request id -> what `submit` raises while a batch holds that request.
    failing_rows: request id -> what its row's outcome is.
    on_write:   called with the id of each block that a step writes.
    on_execute: called at each execution, e.g. to move a clock.
    executed:   (request id, number of tokens) of each batch, in order.

    Of depth 2 a batch is computed as late as `wait` comes for it, when whatever wrongly
    takes its blocks meanwhile has done so.
    """

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int = 1000, weight: int = 1, *, window: int | None = None, depth: int = 1
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
        self._submitted: deque[Batch] = deque()
        self.depth = depth
        self.grammars = FakeGrammars()

    def submit(self, batch: Batch) -> None:
        """See ports.ModelRunner."""
        self._submitted.append(batch)
        assert len(self._submitted) <= self.depth, "a batch too many is under way"

    def wait(self) -> list[RowOutcome]:
        """See ports.ModelRunner."""
        try:
            return self._execute(self._submitted.popleft())
        except Exception:
            self._submitted.clear()
            raise

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
                self._slots[self._slot(block_table, position)] = _kv(known[position] if position < len(known) else 0, position)
            outcomes.append(self._outcome(item))
        return outcomes

    def forget(self, request_id: str) -> None:
        """See ports.ModelRunner."""
        self.forgotten.append(request_id)

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """See ports.KVMemory."""
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def landing(self, block_id: int, heads: range | None = None) -> memoryview:
        """See ports.KVMemory."""
        return self.block(block_id)

    def land(self, block_id: int, landing: memoryview, heads: range | None = None) -> None:
        """See ports.KVMemory."""

    def reference(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, by plain recursion over the formula; no blocks involved."""
        known = list(tokens)
        for _ in range(count):
            total = sum(_kv(known[position], position) for position in range(self._first(len(known) - 1), len(known)))
            known.append((self._weight * total + len(known)) % self._vocab_size)
        return known[len(tokens) :]

    def _outcome(self, item: Scheduled) -> RowOutcome:
        request = item.request
        if request.request_id in self.failing_rows or not item.samples:
            return self.failing_rows.get(request.request_id)
        ends = range(item.end - len(item.drafts), item.end + 1)
        return verified(item.drafts, [Sample(self._next_token(request.block_table, end)) for end in ends])

    def _first(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size

    def _next_token(self, block_table: list[int], num_tokens: int) -> int:
        seen = range(self._first(num_tokens - 1), num_tokens)
        total = sum(self._slots[self._slot(block_table, position)] for position in seen)
        return (self._weight * total + num_tokens) % self._vocab_size


def _kv(token: int, position: int) -> int:
    return (token + 1) * (position + 1)


@dataclass(slots=True)
class _Opened:
    block_ids: list[int]
    received: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sending:
    engine_id: str
    queued: deque[tuple[int, int]] = field(default_factory=deque)
    checksum: int = 0
    cancelled: bool = False
    ended: bool = False


class FakeNetwork:
    """Fake transports by engine id.

    corrupt_next: flip a bit of the next block that arrives.
    """

    def __init__(self) -> None:
        self.transports: dict[str, FakeTransport] = {}
        self.corrupt_next = False

    def deliver_all(self) -> None:
        """Move whatever is queued anywhere."""
        for transport in self.transports.values():
            while transport.deliver():
                pass


class FakeTransport:
    """`engine.ports.Transport` over a FakeNetwork.

    holding:  keep fences and cancels unanswered until `settle`; late blocks may then still move.
    clock:    the engine's.
    verify:   answer checksums.
    on_read:  called with a source block when its bytes leave; on_write: with a target block when bytes land in it.
    """

    def __init__(
        self,
        network: FakeNetwork,
        memory: KVMemory,
        engine_id: str,
        clock: Callable[[], float],
        verify: bool = False,
    ) -> None:
        self.holding = False
        self.on_read: Callable[[int], None] = lambda block_id: None
        self.on_write: Callable[[int], None] = lambda block_id: None
        self.forgotten: list[bytes] = []
        self._network = network
        self._memory = memory
        self._clock = clock
        self.verify = verify
        self._opened: dict[bytes, _Opened] = {}
        self._sending: dict[bytes, _Sending] = {}
        self._held: list[Callable[[], None]] = []
        self._events: list[TransferEvent] = []
        network.transports[engine_id] = self

    def open(self, epoch: bytes, block_ids: Sequence[int]) -> None:
        """See ports.Transport."""
        assert epoch not in self._opened, "an epoch is opened once"
        assert not set(block_ids) & {block for opened in self._opened.values() for block in opened.block_ids}, "a block is open twice"
        self._opened[epoch] = _Opened(list(block_ids))

    def fence(self, epoch: bytes) -> None:
        """See ports.Transport."""
        self._answer(lambda: self._close_epoch(epoch))

    def write(self, epoch: bytes, engine_id: str, addresses: Sequence[str], pairs: Sequence[tuple[int, int]]) -> None:
        """See ports.Transport; `addresses` are not looked at."""
        sending = self._sending.setdefault(epoch, _Sending(engine_id))
        if not sending.ended:
            sending.queued.extend(pairs)

    def checksum(self, epoch: bytes) -> int | None:
        """See ports.Transport."""
        return self._sending[epoch].checksum if self.verify else None

    def forget(self, epoch: bytes) -> None:
        """See ports.Transport."""
        self.forgotten.append(epoch)
        self._sending.pop(epoch, None)

    def cancel(self, epoch: bytes) -> None:
        """See ports.Transport."""
        if (sending := self._sending.get(epoch)) is not None:
            sending.cancelled = True
        self._answer(lambda: self._end(epoch, "cancelled"))

    def poll(self) -> list[TransferEvent]:
        """See ports.Transport."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See ports.Transport."""

    def deliver(self) -> bool:
        """Move the oldest queued block of the oldest epoch; False when nothing is queued."""
        for epoch, sending in self._sending.items():
            if sending.queued:
                self._deliver_block(epoch, sending)
                return True
        return False

    def queued_blocks(self) -> list[int]:
        """Source blocks that have not moved yet."""
        return [source for sending in self._sending.values() for source, _ in sending.queued]

    def fail(self, reason: str) -> None:
        """Break the connection: every epoch with blocks queued ends."""
        for epoch in [epoch for epoch, sending in self._sending.items() if sending.queued and not sending.cancelled]:
            self._end(epoch, reason)

    def settle(self) -> None:
        """Answer the fences and cancels that were held."""
        held, self._held = self._held, []
        for answer in held:
            answer()

    def _answer(self, answer: Callable[[], None]) -> None:
        if self.holding:
            self._held.append(answer)
        else:
            answer()

    def _deliver_block(self, epoch: bytes, sending: _Sending) -> None:
        source, target = sending.queued.popleft()
        self.on_read(source)
        data = bytes(self._memory.block(source))
        sending.checksum = zlib.crc32(data, sending.checksum)
        if not self._network.transports[sending.engine_id]._accept(epoch, target, data):
            self._end(epoch, "refused: dead epoch")
        elif not sending.cancelled:
            self._events.append(BlocksSent(epoch, (source,), len(data), at=self._clock()))

    def _accept(self, epoch: bytes, target: int, data: bytes) -> bool:
        opened = self._opened.get(epoch)
        if opened is None:
            return False
        assert opened.block_ids[len(opened.received)] == target, f"block {target} is written out of order or twice"
        self.on_write(target)
        if self._network.corrupt_next:
            self._network.corrupt_next = False
            data = bytes([data[0] ^ 1]) + data[1:]
        self._memory.block(target)[:] = data
        opened.received.append(target)
        return True

    def _close_epoch(self, epoch: bytes) -> None:
        opened = self._opened.pop(epoch, _Opened([]))
        checksum: int | None = None
        if self.verify and opened.received == opened.block_ids:
            checksum = 0
            for block_id in opened.block_ids:
                checksum = zlib.crc32(self._memory.block(block_id), checksum)
        num_bytes = len(opened.received) * len(self._memory.heads) * self._memory.head_bytes
        self._events.append(Fenced(epoch, frozenset(opened.received), num_bytes, checksum))

    def _end(self, epoch: bytes, reason: str) -> None:
        # An epoch ends once; a cancel of one that has failed meanwhile is answered by that failure.
        sending = self._sending.get(epoch)
        if sending is not None:
            if sending.ended:
                return
            sending.ended = True
            sending.queued.clear()
        self._events.append(SendEnded(epoch, reason))
