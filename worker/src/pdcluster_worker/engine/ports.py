"""Ports of the pure engine: a model to run and a transport for KV blocks."""

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
    """The token chosen after the last scheduled position of one request."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  # see `messages.requests.Token`


class DraftSamples(msgspec.Struct, frozen=True):
    """Drafts that were sampled, then the token after them; at least one."""

    samples: tuple[Sample, ...]


def failed_row(reason: RowFailure, message: str, param: str | None = None) -> RequestError:
    """The entry of a row that failed; the message names the cause and the fix."""
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
            self.inputs + other.inputs, self.forward + other.forward, self.sample + other.sample
        )


@dataclass(slots=True)
class GrammarCounts:
    requests: Counter[str] = field(default_factory=Counter)  # that have one, by its kind
    hits: int = 0  # those of them whose grammar was compiled, or being compiled, before
    # (outcome, seconds) of each, outcome: compiled or failed.
    compiles: list[tuple[str, float]] = field(default_factory=list)


class Grammars(Protocol):
    """Compiles what constrains answers, beside the engine."""

    def begin(self, request: EngineRequest) -> None:
        """Begin to compile the constraint of a new request, unless that was done before."""

    def open(self, request: EngineRequest) -> bool | RequestError:
        """True once its constraint is compiled, False until then; the error where it cannot be."""

    def take_counts(self) -> GrammarCounts:
        """Counts since the last call."""


class LoadedAdapter(NamedTuple):
    weights: str  # fingerprint
    num_bytes: int  # that it takes


class AdapterLoader(Protocol):
    """LoRA adapters that come and go while the engine runs."""

    @property
    def free_bytes(self) -> int:
        """Room for further ones."""

    def begin(self, name: str, path: str) -> None:
        """Begin to load; steps go on."""

    def take(self) -> list[tuple[str, LoadedAdapter | RequestError]]:
        """By name, those that are loaded or refused since the last call."""

    def remove(self, name: str) -> None:
        """Free one that no step has any more."""


class ModelRunner(Protocol):
    """Runs steps of the model over the paged KV cache that it owns, one after another."""

    @property
    def grammars(self) -> Grammars:
        """Grammars of the requests that have a constraint; a batch holds only open ones."""

    @property
    def adapters(self) -> AdapterLoader | None:
        """None where only those that were loaded with the model are served."""

    @property
    def depth(self) -> int:
        """Batches prepared and not waited for: 1, or 2 if one is while another computes."""

    @property
    def seconds(self) -> StepSeconds:
        """Times of the last `wait` that returned."""

    def prepare(self, batch: Batch) -> Any:
        """Make the inputs of a batch; tokens unknown yet come with `begin`.  May raise."""

    def begin(self, prepared: Any, sampled: Mapping[EngineRequest, int]) -> None:
        """Begin to compute once the one before has ended; sampled: the tokens of that one."""

    def wait(self, prepared: Any) -> Sequence[RowOutcome]:
        """One outcome per item: Sample, DraftSamples, None if nothing is sampled, or its error.

        A row that fails by itself (`failed_row`) changes no other.  Running items again gives the
        same result, so a batch that raises may be retried in parts.
        """

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept for this request; unknown ids are a no-op."""


def execute(runner: ModelRunner, batch: Batch) -> Sequence[RowOutcome]:
    prepared = runner.prepare(batch)
    runner.begin(prepared, {})
    return runner.wait(prepared)


class Drafter(Protocol):
    """Guesses the next tokens of requests, from all of their known ones."""

    def may_follow(self, request: EngineRequest) -> bool:
        """Return whether there may be drafts once the step in flight has given one more token."""

    def draft(self, requested: Sequence[tuple[EngineRequest, int]]) -> list[list[int]]:
        """At most so many drafts for each request; none without a guess."""

    def forget(self, request_id: str) -> None:
        """Drop whatever is kept for this request; unknown ids are a no-op."""


class KVMemory(Protocol):
    """The bytes of the KV cache, or of one rank's heads of it, as a transport sees them."""

    heads: range  # KV heads of the model that are held here
    head_bytes: int  # of one head of a block
    num_blocks: int

    def block(self, block_id: int, heads: range | None = None) -> memoryview:
        """These heads (None = all) of one block, contiguous, in host memory; a copy on a device."""

    def staging(self, block_id: int, heads: range | None = None) -> memoryview:
        """Writable host memory for heads of a block; they count from `write_block` on."""

    def write_block(self, block_id: int, staging: memoryview, heads: range | None = None) -> None:
        """Make the bytes of a whole `staging` those of the block; steps after it read them."""


class SlotMemory(Protocol):
    """Memory that a carrier may read and write; copies are done on return.  Thread-safe."""

    array: Any  # of its bytes, where they are
    address: int  # of the first
    device: int | None  # number of the GPU that has

    def write(self, start: int, data: bytes) -> None:
        """Copy bytes of the host to `start`."""

    def read(self, start: int, num_bytes: int) -> bytes:
        """A copy, in host memory."""

    def load(self, start: int, block_id: int, heads: range) -> None:
        """Copy these heads of one block to `start`."""

    def write_block(self, start: int, block_id: int, heads: range) -> None:
        """Copy as many bytes from `start` on into these heads of one block."""


@runtime_checkable
class HasSlots(Protocol):
    """A KVMemory that can have slots where its blocks are, on a device."""

    def slots(self, num_bytes: int) -> SlotMemory:
        """Raises RuntimeError where the device has no room."""


class TransferRoute(NamedTuple):
    """The way that blocks went.  note: why not that which was asked for; empty = it was."""

    transport: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class BlocksSent:
    """The peer acknowledged these source blocks of this epoch: they are no longer read."""

    epoch: bytes
    block_ids: tuple[int, ...]
    num_bytes: int
    # The engine's clock when that happened; the engine may see it a whole step later.
    at: float = field(compare=False)
    route: TransferRoute = field(compare=False)


@dataclass(frozen=True, slots=True)
class SendEnded:
    """No source block of this epoch is read any more: cancelled, or a write failed."""

    epoch: bytes
    # Why, in words for a log ("cancelled", "connection reset by peer", "refused: dead epoch").
    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of this epoch is in flight into a block, and none will be accepted."""

    epoch: bytes
    received: frozenset[int]  # target blocks that arrived whole before the fence
    num_bytes: int
    # Over all target blocks in their order, None when verification is off or a block is missing.
    checksum: int | None = None


TransferEvent = BlocksSent | SendEnded | Fenced


class Transport(Protocol):
    """Moves KV blocks: a writer pushes into blocks that the receiver has opened under an epoch."""

    # Receiving: `open`, writes land, `fence`, `Fenced`.
    # Sending: `write`, `BlocksSent`, or `SendEnded` once.

    def open(self, epoch: bytes, block_ids: Sequence[int], *, verify: bool = False) -> None:
        """Accept writes of this epoch into exactly these blocks, each once, in this order.

        verify: its `Fenced` has a checksum, also where those of others have none.
        Raises ValueError on a block that another epoch has open.
        """

    def fence(self, epoch: bytes) -> None:
        """Close the epoch for good; `Fenced` follows, an empty one for unknown epochs."""

    def write(
        self,
        epoch: bytes,
        engine_id: str,
        addresses: Sequence[str],
        pairs: Sequence[tuple[int, int]],
        *,
        verify: bool = False,
    ) -> None:
        """Queue writes of (source block here, target block there), in order.

        addresses: of the peer's KV ports, each of which takes an even share of the heads.
        The caller keeps every source block alive until `BlocksSent` or `SendEnded` names it.
        """

    def checksum(self, epoch: bytes) -> int | None:
        """Checksum of all blocks sent under this epoch, in write order; None when it is off."""

    def forget(self, epoch: bytes) -> None:
        """Drop the sending side's record of a finished epoch."""

    def cancel(self, epoch: bytes) -> None:
        """Stop sending; `SendEnded` follows, for unknown epochs too."""

    def poll(self) -> list[TransferEvent]:
        """Events since the last call, in order; never waits."""

    def close(self) -> None:
        """Stop all threads and sockets; outstanding epochs are abandoned."""
