"""Messages between server and engine process: MessagePack on a ZMQ ipc socket, a list of them a
frame.

Only durations (in seconds) travel: monotonic clocks do not cross processes.
"""

from typing import Literal, get_args

import msgspec

from pdcluster_worker.messages.adapters import (
    AdapterReply,
    LoadAdapter,
    ResidentAdapters,
    UnloadAdapter,
)
from pdcluster_worker.messages.facts import OWN_KV, DeviceFacts, KVGeometry
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget

RowFailure = Literal[
    "not_finite",  # its logits are NaN or infinite
    "no_token_left",  # its sampling excludes every token
    "unknown_token_ids",  # its sampling names tokens that the model has not
    "outside_grammar",  # its output, as it came here, does not fit its constraint
    "slow_grammar",  # its constraint takes too long to follow, for which its steps wait
]
"""Reason why one row of a batch has no token."""

ROW_FAILURES: tuple[RowFailure, ...] = get_args(RowFailure)

RAISED = "raised"
"""Reason of an item whose forward pass raised."""


# --- server -> engine -------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    spec: RequestSpec


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Make room for a request that another worker prefills: `ReceiveReady` or `ReceiveRefused`."""

    spec: RequestSpec


class ReceiveDone(msgspec.Struct, frozen=True, tag=True):
    """The last write is acknowledged: take the blocks and decode on from `first`."""

    request_id: str
    epoch: bytes
    first: Token
    checksum: int | None = None  # of the written blocks; None when verification is off


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """The prefill worker keeps the KV: fetch it, and make all tokens; or answer `FetchFailed`."""

    request_id: str
    epoch: bytes
    handle: bytes  # of its PrefillDone


class ReceiveFailed(msgspec.Struct, frozen=True, tag=True):
    """The remote prefill will not end well: quarantine and fence the blocks, prefill here."""

    request_id: str
    epoch: bytes
    first: Token | None = None  # that the client already has, which is kept


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Compute this prompt and write the KV to `target`: answered by a Token, which may be the last,
    then PrefillDone or PrefillFailed; without the Token where PrefillDone has a handle.
    """

    spec: RequestSpec
    target: TransferTarget


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Not answered; unknown ids are a no-op."""

    request_id: str


class DeferGroups(msgspec.Struct, frozen=True, tag=True):
    """Waiting requests of these groups go behind all others of their priority.  The groups of the
    message before no longer do.  evicts: running ones make way for others that wait, too.
    """

    groups: list[str]
    evicts: bool = False


class AskSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Answered by BlockEvents with the whole prefix cache."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Pong between two steps."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message."""

    dtype: Literal["float32", "bfloat16"]


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


EngineInput = (
    Begin
    | Submit
    | Receive
    | ReceiveDone
    | Fetch
    | ReceiveFailed
    | Prefill
    | Abort
    | DeferGroups
    | LoadAdapter
    | UnloadAdapter
    | AskSnapshot
    | Ping
    | Stop
)


# --- engine -> server -------------------------------------------------------------------------


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine process: weights are loaded, the KV port listens."""

    engine_id: str
    kv_ports: list[int]  # of its ranks, each for an even share of the KV heads, in their order
    geometry: KVGeometry
    weights: str  # fingerprint of the weights
    dtype: str
    num_blocks: int
    max_model_len: int
    vocab_size: int
    device: DeviceFacts
    transport: str  # tcp, nixl or ucx: that moves KV between peers that have it; empty = none does
    longest_step_seconds: float = 0.0  # of its warm-up, whose steps are about as large as any
    own_stop_seconds: float = 0.0  # it ends by itself after so long in one step; 0 = it does not
    scheduler: str = "continuous"
    scheduling_policy: str = "priority"
    restarts_grammar: bool = False  # it cannot go on with a structured answer that has begun
    prefix_caching: bool = True  # KV of a prompt is found whole by others that begin like it
    length_note: str = ""  # why max_model_len is lower than the model's own; empty where it is not
    precision: str = ""  # of the layers' weights; empty = not said by a stock engine

    @property
    def hands_over_kv(self) -> bool:
        """True if other decode workers may read KV of its prefix cache: not of a stock engine's."""
        return self.geometry.kind == OWN_KV and bool(self.transport) and self.prefix_caching


class Pong(msgspec.Struct, frozen=True, tag=True):
    """num_steps: since the start.  has_work: a step now runs the model."""

    num_steps: int
    has_work: bool


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """All tokens of one step; several of one request, in order, when its drafts were right."""

    tokens: list[Token]


class ReceiveReady(msgspec.Struct, frozen=True, tag=True):
    """Blocks are held for this request under `epoch`; other fields as in `TransferTarget`."""

    request_id: str
    epoch: bytes
    cached_tokens: int
    block_ids: list[int]


class ReceiveRefused(msgspec.Struct, frozen=True, tag=True):
    """No room now.  Try again when `EngineStats.free_blocks` has reached `needed_blocks`."""

    request_id: str
    needed_blocks: int


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """Every write of the request is acknowledged; the engine no longer reads its blocks."""

    request_id: str
    num_bytes: int
    seconds: float  # from the first write to the last acknowledgement
    checksum: int | None = None
    busy_seconds: float = 0.0  # part of `seconds` with a write under way; 0 = too short to measure
    transport: str = ""  # that moved it; empty = that of `EngineReady`
    handle: bytes = b""  # by which the target's engine fetches the KV; empty = it was written
    transport_note: str = ""  # why not the one that was asked for; empty = it did


class Received(msgspec.Struct, frozen=True, tag=True):
    """Outcome of a transfer with `RequestSpec.verify_transfer`; the next token follows it."""

    request_id: str
    num_tokens: int  # of the prompt whose KV the peer made and this engine uses
    num_blocks: int = 0  # that arrived; 0 where the engine does not know
    num_bytes: int = 0  # likewise
    is_intact: bool | None = None  # equal checksums; None = one engine has none
    seconds: float = 0.0  # for which these bytes were moved; 0 = the peer's engine measured it


class PrefillFailed(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    reason: str


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """The request waits for `ReceiveFailed`."""

    request_id: str
    reason: str


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """This request alone failed; all that it still holds is quarantined."""

    request_id: str
    message: str
    is_refusal: bool = False  # it could never run here, by its own size, shape or settings
    param: str | None = None  # the part of its sampling that is at fault
    lacks_adapter: bool = False  # its weights are no longer here, and may be at another worker


class Preempted(msgspec.Struct, frozen=True, tag=True):
    """A request that decodes here lost its blocks, and waits to be computed again."""

    request_id: str


class BlockEvents(msgspec.Struct, frozen=True, tag=True):
    """Changes of the prefix cache, in order: hashes that became reusable here, or no longer are."""

    stored: list[bytes]
    removed: list[bytes]
    sequence: int  # one more each, from 1
    is_cleared: bool = False  # all earlier events are void


class EngineTotals(msgspec.Struct):
    """Counters since the engine started."""

    num_steps: int = 0
    busy_seconds: float = 0.0
    overhead_seconds: float = 0.0  # part of busy_seconds outside the model
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    inputs_seconds: float = 0.0  # parts of busy_seconds inside the model: making its inputs,
    forward_seconds: float = 0.0  # the forward pass,
    sample_seconds: float = 0.0  # and sampling
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    # messages taken since the start: what was sent after that many is not in this report
    num_inputs: int = 0
    # Drafts that were verified, and those of them that were right, by position among a request's in
    # one step.
    drafted: list[int] = []
    accepted: list[int] = []
    # (kind, seconds) of each step since the last report; kind: prefill, decode, mixed
    steps: list[tuple[str, float]] = []
    # Of each of `steps`: requests; tokens prefilled, decoded, recomputed.
    batches: list[tuple[int, int, int, int]] = []


TIER_READS = ("read", "slow", "lost", "computed", "given_up")
"""Outcomes for prefixes that tiers have: read, read more slowly than computed, computed since no
block of them was whole or still there, since that is expected to be faster, and since reading took
too long.
"""

TIER_LOOKUPS = ("found", "absent", "late", "failed")
"""Outcomes of asking a shared store for the rest of a prefix; late: it was not waited for."""


class TierStats(msgspec.Struct, array_like=True):
    """Counters of one tier since the engine started, and `stored` as of now."""

    name: str
    num_slots: int
    stored: int = 0  # blocks
    saved_bytes: int = 0
    loaded_bytes: int = 0
    evictions: int = 0
    damaged: int = 0  # blocks that were not whole when they were read
    reason: str = ""  # why it takes no blocks or is not read now; empty = it works
    absent: int = 0  # blocks that others had deleted from a shared store when they were read
    failures: int = 0  # copies and lookups that it refused or did not answer
    store: str = ""  # identity of a shared store, the same at all its workers


_USED_STATES = ("in_use", "receiving", "quarantined")


class EngineStats(EngineTotals, tag=True, kw_only=True):
    """Gauges as of now and counters since the engine started; sent while it works (at most every
    0.1 s) and once when it goes idle.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0  # tokens still to be computed of requests that wait for prefill
    num_receiving: int = 0
    blocks: dict[str, int]  # by state: free, cached, in_use, receiving, quarantined
    free_blocks: int  # what an allocation could take now; 0 where vLLM runs all that it may
    fences_overdue: int = 0
    preemptions: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    num_transfers: int = 0  # either way: not yet acknowledged, ended or fenced
    failed_rows: dict[str, int] = {}  # items of batches that failed, by reason
    evictions: int = 0  # cached blocks that were taken for other tokens
    # Of constraints, since the last report: (kind, requests), those whose grammar was known, and
    # (outcome, seconds) of each compile.
    constraint_requests: list[tuple[str, int]] = []
    constraint_hits: int = 0
    constraint_compiles: list[tuple[str, float]] = []
    # Of the prefill delayer, since the last report: passes by (status, allowed, reason, executed,
    # count), and (passes, seconds) waited.
    delay_outcomes: list[tuple[str, bool, str, bool, int]] = []
    delay_waits: list[tuple[int, float]] = []
    tiers: list[TierStats] = []
    tier_reads: dict[str, int] = {}  # of `TIER_READS`
    tier_lookups: dict[str, int] = {}  # of `TIER_LOOKUPS`

    @property
    def used_blocks(self) -> int:
        """Blocks that are neither free nor the prefix cache's alone."""
        return sum(self.blocks.get(state, 0) for state in _USED_STATES)


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The process ends after this message."""

    message: str


EngineOutput = (
    EngineReady
    | Pong
    | Tokens
    | ReceiveReady
    | ReceiveRefused
    | PrefillDone
    | Received
    | PrefillFailed
    | FetchFailed
    | RequestFailed
    | AdapterReply
    | ResidentAdapters
    | Preempted
    | BlockEvents
    | EngineStats
    | EngineFailed
)

encode = msgspec.msgpack.Encoder().encode
decode_inputs = msgspec.msgpack.Decoder(list[EngineInput]).decode
decode_outputs = msgspec.msgpack.Decoder(list[EngineOutput]).decode
