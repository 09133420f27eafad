"""Ports of the pure engine: a model to run and a transport for KV blocks.

`model` and `kv_transfer` implement these protocols.  Every call is made from the engine's one
thread and waits for no peer; what happens later comes back through `Transport.poll`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from pdcluster_worker.engine.request import Batch, EngineRequest
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import RowFailure
from pdcluster_worker.messages.requests import PromptLogprob


class EngineBrokenError(RuntimeError):
    """The model fails whatever it is given; the engine process must end."""


class Sample(msgspec.Struct, frozen=True):
    """The token chosen after the last scheduled position of one request.

    prompt_logprobs: see `messages.requests.Token`.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class DraftSamples(msgspec.Struct, frozen=True):
    """Tokens of an item with drafts: the drafts that were sampled, then the token after them; at
    least one.
    """

    samples: tuple[Sample, ...]


def failed_row(reason: RowFailure, message: str, param: str | None = None) -> RequestError:
    """The entry of a row that failed; the message names the cause and the fix.  param: see
    `messages.engine.RequestFailed`.
    """
    return RequestError(
        message, status=500 if reason == "not_finite" else 400, code=reason, param=param
    )


RowOutcome = Sample | DraftSamples | RequestError | None
"""Outcome of one item: its tokens, the error, or None where its known tokens are not
all computed.
"""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step by part: making inputs, the forward pass, sampling."""

    inputs: float = 0.0
    forward: float = 0.0
    sample: float = 0.0

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        return StepSeconds(
            self.inputs + other.inputs,
            self.forward + other.forward,
            self.sample + other.sample,
        )


@dataclass(slots=True)
class GrammarCounts:
    """Counts of work on constraints.

    requests: that have one, by its kind.  hits: those of them whose grammar was compiled, or being
              compiled, before.
    compiles: (outcome, seconds) of each, outcome: compiled or failed.
    """

    requests: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    compiles: list[tuple[str, float]] = field(default_factory=list)


class Grammars(Protocol):
    """Compiles what constrains answers, beside the engine."""

    def begin(self, request: EngineRequest) -> None:
        """Begin to compile the constraint of a new request, unless that was done before."""
        ...

    def open(self, request: EngineRequest) -> bool | RequestError:
        """Return whether tokens may be sampled for this request from now on, until
        `ModelRunner.forget`.

        False: not yet; it never waits.  An error: the constraint cannot be compiled, with the
               reason.
        """
        ...

    def take_counts(self) -> GrammarCounts:
        """Counts since the last call."""
        ...


class ModelRunner(Protocol):
    """Runs steps of the model over the paged KV cache that it owns, one after another."""

    @property
    def grammars(self) -> Grammars:
        """Grammars of the requests that have a constraint; a batch holds only open ones."""
        ...

    @property
    def depth(self) -> int:
        """Batches that may be prepared and not waited for: 1, or 2 if one is while another
        computes.
        """
        ...

    @property
    def seconds(self) -> StepSeconds:
        """Times of the last `wait` that returned."""
        ...

    def prepare(self, batch: Batch) -> Any:
        """Make the inputs of a batch, which may follow one that is computed now.

        The value of a token that is not known yet is given to `begin`.  Blocks and known tokens of
        a request stay as they are while a batch with it is in flight.  May raise.
        """
        ...

    def begin(self, prepared: Any, sampled: Mapping[EngineRequest, int]) -> None:
        """Begin to compute a prepared batch and write its KV, once the one before has ended.

        sampled: tokens that the batch before has sampled; if it has none for a request, whatever
                 this batch computes for the request is discarded.
        """
        ...

    def wait(self, prepared: Any) -> Sequence[RowOutcome]:
        """The outcomes of the batch that was begun; one entry per item, in order.

        An entry is a Sample when the item reaches the end of its known tokens (`item.samples`), a
        DraftSamples if it has drafts, else None.  If a row fails by itself its entry is the error
        (`failed_row`), and the other rows are as if it were not there.  Running the same items
        again gives the same result (writes are idempotent), so a failed batch may be retried in
        parts.  Raises whatever a forward pass raises; the core isolates the request at fault.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept for this request; unknown ids are a no-op."""
        ...


def execute(runner: ModelRunner, batch: Batch) -> Sequence[RowOutcome]:
    """Run one batch, with no other in flight."""
    prepared = runner.prepare(batch)
    runner.begin(prepared, {})
    return runner.wait(prepared)


class Drafter(Protocol):
    """Guesses the next tokens of requests, from all of their known ones."""

    def may_follow(self, request: EngineRequest) -> bool:
        """Return whether there may be drafts once the step under way has given one more token."""
        ...

    def draft(self, requested: Sequence[tuple[EngineRequest, int]]) -> list[list[int]]:
        """Draft for each request at most so many tokens, to follow its known ones; none where there
        is no guess.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept for this request; unknown ids are a no-op."""
        ...


class KVMemory(Protocol):
    """The bytes of the KV cache, or of one rank's heads of it, as a transport sees them.

    heads: KV heads of the model that are held here.  head_bytes: of one head of a block.
    """

    heads: range
    head_bytes: int
    num_blocks: int

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """The bytes of these heads of one block, contiguous, in host memory: to be read.  heads:
        None = all held.

        Those of a cache on a device are a copy, made now.  Safe from any thread.
        """
        ...

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        """Writable host memory for these heads of a block that arrives; they count
        from `write_block` on.
        """
        ...

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Make the bytes of a whole `staging` those of the block; steps after it read them."""
        ...


class SlotMemory(Protocol):
    """A run of memory that a carrier may read and write, for frames of blocks; a copy is there when
    its call returns.  Safe from any thread.

    array: of its bytes, where they are.  address: of the first.  device: number of the GPU that has
    them; None = host memory.
    """

    array: Any
    address: int
    device: int | None

    def write(self, start: int, data: bytes) -> None:
        """Copy bytes of the host to `start`."""
        ...

    def read(self, start: int, num_bytes: int) -> bytes:
        """A copy, in host memory."""
        ...

    def load(self, start: int, block_id: int, heads: range) -> None:
        """Copy these heads of one block to `start`."""
        ...

    def write_block(self, start: int, block_id: int, heads: range) -> None:
        """Copy as many bytes from `start` on into these heads of one block."""
        ...


@runtime_checkable
class HasSlots(Protocol):
    """A KVMemory that can have slots where its blocks are, on a device."""

    def slots(self, num_bytes: int) -> SlotMemory:
        """Raises RuntimeError where the device has no room."""
        ...


class TransferRoute(NamedTuple):
    """The way that blocks went.  note: why not that which was asked for; empty = it was."""

    transport: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class BlocksSent:
    """The peer acknowledged these source blocks of this epoch: they are no longer read.

    at: the engine's clock when that happened; the engine may see it a whole step later.
    """

    epoch: bytes
    block_ids: tuple[int, ...]
    num_bytes: int
    at: float = field(compare=False)
    route: TransferRoute = field(compare=False)


@dataclass(frozen=True, slots=True)
class SendEnded:
    """No source block of this epoch is or will be read any more; the answer to `cancel` and to a
    failed write.

    reason: why, in words for a log ("cancelled", "connection reset by peer", "refused: dead
            epoch").
    """

    epoch: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of this epoch is under way into a block, and none will be accepted.

    received: target blocks that arrived whole before the fence.
    checksum: over all target blocks in their order, None when verification is off or a block is
              missing.
    """

    epoch: bytes
    received: frozenset[int]
    num_bytes: int
    checksum: int | None = None


TransferEvent = BlocksSent | SendEnded | Fenced


class Transport(Protocol):
    """Moves KV blocks: a writer pushes into blocks that the receiver has opened under an epoch.

    Receiving side: `open` -> (writes land) -> `fence` -> `Fenced`.
    Sending side:   `write`* -> `BlocksSent`* ; or `cancel` / a failure -> `SendEnded`, once per
                    epoch.
    """

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Accept writes of this epoch into exactly these blocks, each once.

        verify: its `Fenced` has a checksum, also where those of others have none.
        """
        ...

    def fence(self, epoch: bytes) -> None:
        """Close the epoch for good; `Fenced` follows from `poll`, at once for an epoch with nothing
        in flight.

        Unknown or already fenced epochs answer Fenced with an empty set.
        """
        ...

    def write(
        self,
        epoch: bytes,
        engine_id: str,
        addresses: Sequence[str],
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """Queue writes of (source block here, target block there); writes of an epoch keep their
        order.

        addresses: of the peer's KV ports, each of which takes an even share of the heads, in their
                   order.
        verify:    the epoch has a `checksum`, also where others have none; for all its writes.
        The caller keeps every source block alive until `BlocksSent` or `SendEnded` names it.
        """
        ...

    def checksum(self, epoch: bytes) -> int | None:
        """Checksum of all blocks sent so far under this epoch, in write order (see
        `kv_transfer.layout`).

        None when verification is off.
        """
        ...

    def forget(self, epoch: bytes) -> None:
        """Drop the sending side's record of a finished epoch."""
        ...

    def cancel(self, epoch: bytes) -> None:
        """Stop sending; `SendEnded` follows when no source block is read any more.

        Unknown epochs answer it too.
        """
        ...

    def poll(self) -> list[TransferEvent]:
        """Events since the last call, in order; never waits."""
        ...

    def close(self) -> None:
        """Stop all threads and sockets; outstanding epochs are abandoned."""
        ...
