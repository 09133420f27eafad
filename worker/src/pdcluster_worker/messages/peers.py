"""Messages between workers: MessagePack in the calls of `peers.calls`."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdcluster_schema.ports import MAX_ADAPTERS
from pdcluster_schema.sections import ENGINELESS
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget

Name = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, le=1e300)]
"""Finite: a step without an end would be endless patience with that peer."""

PrefillMode = Literal["auto", "local", "remote"]
"""Place where a client wants the prefill: its extension field `pdcluster.prefill`."""

PrefillPlace = Literal["local", "remote"]
"""Place where the first token was made."""


Fact = str | int | float | bool


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    name: str
    seconds: float  # of the reader's `time.monotonic`
    facts: dict[str, Fact]  # no other objects: the garbage collector does not see them
    worker: str = ""  # its pod; "" = this one


class Generated(msgspec.Struct, frozen=True):
    """One token of one choice; prefill and degraded are of its first."""

    token: Token
    prefill: PrefillPlace | None = None
    index: int = 0
    degraded: tuple[str, ...] = ()
    notes: tuple[TraceEvent, ...] = ()  # of the worker that made it


class TierLoad(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one tier below the pool, of all engines of a worker.  store: identity of one that
    workers share, while it answers.
    """

    name: str
    stored: Count = 0
    num_slots: Count = 0
    store: str = ""


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Load of all engines of a worker, reported about once a second."""

    num_running: Count = 0
    num_waiting: Count = 0
    waiting_tokens: Count = 0
    credit_queue_requests: Count = 0  # of a decode worker: they wait for a credit
    credit_queue_tokens: Count = 0
    free_blocks: Count = 0
    total_blocks: Count = 0
    state: str = "ready"  # that of its record, or stalled
    progress: Count = 0  # grows with each engine step and each byte of KV sent
    longest_step_seconds: Amount = 0.0  # so far
    credit_tokens: Count = 0  # of a prefill worker: promised, or being computed
    busy_ratio: Amount = 0.0  # of its GPU, else of its engine
    memory_bandwidth_ratio: Amount = 0.0  # time in which its GPU moves memory; 0 = unknown
    num_transfers: Count = 0  # requests whose KV is on its way to or from here
    used_blocks: Count = 0  # that hold tokens of live requests
    kv_bytes: Count = 0  # of KV sent and received so far
    remote_prefills: Count = 0  # of a decode worker: prompts so far, by the place of their prefill
    local_prefills: Count = 0
    tiers: tuple[TierLoad, ...] = ()  # the fastest first
    # fingerprints of those that were loaded while it runs, by name
    adapters: Annotated[dict[str, str], Meta(max_length=MAX_ADAPTERS)] = {}

    @property
    def store(self) -> str:
        return next((tier.store for tier in self.tiers if tier.store), "")

    @property
    def num_requests(self) -> int:
        """Requests on the worker: running, waiting for its engine, or for a credit."""
        return self.num_running + self.num_waiting + self.credit_queue_requests


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """Load, and changes of the prefix cache; a snapshot's `stored` is the whole cache."""

    load: WorkerLoad
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False
    sequence: Count = 0  # one more each; after a gap the reader subscribes again

    def parts(self, max_hashes: int) -> Iterator["Report"]:
        """Split into reports of at most so many hashes; all that is stored comes first: a hash in
        both ends as removed.
        """
        num_stored = len(self.stored)
        for start in range(0, max(num_stored + len(self.removed), 1), max_hashes):
            end = start + max_hashes
            yield replace(
                self,
                stored=self.stored[start:end],
                removed=self.removed[max(start - num_stored, 0) : max(end - num_stored, 0)],
                snapshot=self.snapshot and start == 0,
            )


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """Handshake of one worker."""

    engine_id: Name
    role: str
    geometry: KVGeometry
    weights: str  # fingerprint, whatever their precision
    revision: str
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    operations: str = ""  # as "cpu amx", where engine.batchInvariant promises equal bits
    model: str = ""
    max_model_len: Count = 0  # 0 without an engine
    vocab_size: Count = 0
    max_batched_tokens: Count = 0  # of one step of all its engines; 0 = unknown
    restarts_grammar: bool = False  # as in `EngineReady`
    hands_over_kv: bool = False  # likewise
    precision: str = ""  # of the layers' weights, as int8; empty = a stock engine's own
    mixes_precisions: bool = False  # engine.allowMixedPrecision

    @property
    def has_engine(self) -> bool:
        return self.role not in ENGINELESS


class PrefillCall(msgspec.Struct, frozen=True):
    spec: RequestSpec
    engine_id: str  # of the prefill engine that it is meant for; another one refuses
    target: TransferTarget
    worker_id: str = ""  # the decode worker that has the credit; "" = the target's engine


class PrefillReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first token as soon as it is sampled, or the end of the transfer."""

    first_token: Token | None = None
    done: PrefillDone | None = None


class PushPrefix(msgspec.Struct, frozen=True):
    """Take the KV of the prompt of `spec`; answered by a TransferTarget if there is room."""

    engine_id: str  # of the receiver
    worker_id: str  # of the sender, as in its Hello
    spec: RequestSpec


class PrefixPushed(msgspec.Struct, frozen=True):
    first_token: Token
    done: PrefillDone


class OpenCredits(msgspec.Struct, frozen=True, tag=True):
    """First message of a credits stream, whose break returns every unused credit."""

    engine_id: Name


class ClaimCredit(msgspec.Struct, frozen=True, tag=True):
    """Answered at once by granted or queued, a queued one by granted later."""

    request_id: str
    tokens: int
    priority: int


class ReleaseCredit(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class CreditReply(msgspec.Struct, frozen=True):
    request_id: str
    granted: bool


class AskCall(msgspec.Struct, frozen=True):
    """A call of another worker's ingress to the front end of this one's engine."""

    engine_id: str
    path: str
    body: bytes


class WatchCall(msgspec.Struct, frozen=True):
    engine_id: str


encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_prefill = msgspec.msgpack.Decoder(PrefillCall).decode
decode_prefill_reply = msgspec.msgpack.Decoder(PrefillReply).decode
decode_push_prefix = msgspec.msgpack.Decoder(PushPrefix).decode
decode_prefix_pushed = msgspec.msgpack.Decoder(PrefixPushed).decode
decode_target = msgspec.msgpack.Decoder(TransferTarget).decode
decode_credit_call = msgspec.msgpack.Decoder(OpenCredits | ClaimCredit | ReleaseCredit).decode
decode_credit_reply = msgspec.msgpack.Decoder(CreditReply).decode
decode_ask = msgspec.msgpack.Decoder(AskCall).decode
decode_watch = msgspec.msgpack.Decoder(WatchCall).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class SubmitCall(msgspec.Struct, frozen=True, array_like=True, tag=0):
    call: int
    engine_id: str  # that it is meant for; another one refuses
    prefill: str
    spec: msgspec.Raw  # a RequestSpec, decoded apart: a wrong one ends its own call alone
    context: dict[str, str] = {}  # trace headers


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag=1):
    call: int


class CallFailure(msgspec.Struct, frozen=True, array_like=True):
    message: str
    status: int | None = None  # of a RequestError, with what follows; None = the worker's failure
    code: str | None = None
    param: str | None = None
    retry_after_seconds: int | None = None


class CallOutput(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The next token of a call.  The seconds of its notes count from the arrival of the call."""

    call: int
    generated: Generated


class CallEnd(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """End of a call without a last token: a failure, or None for an answer that breaks off."""

    call: int
    failure: CallFailure | None = None


decode_spec = msgspec.msgpack.Decoder(RequestSpec).decode
decode_requests = msgspec.msgpack.Decoder(list[SubmitCall | CancelCall]).decode
decode_replies = msgspec.msgpack.Decoder(list[CallOutput | CallEnd]).decode
decode_failure = msgspec.msgpack.Decoder(CallFailure).decode


Outcome = Literal["verified", "failed", "postponed"]
"""postponed: nothing was sent, since the workers have other work or are about to go."""

Fault = Literal[
    "pair_refused",  # a worker of the prefill pool and this one do not match
    "not_connected",  # no worker of the prefill pool can be reached from here
    "transfer_failed",  # the prefill or the transfer ended with an error, or took too long
    "damaged",  # the checksums of the blocks differ
    "not_used",  # the engine here took none of the KV, and computed the prompt again
    "tokens_differ",  # from those of a local prefill
]


class VerifyCall(msgspec.Struct, frozen=True):
    pod: str  # that is meant; another one may have its address by now
    prefill_pool: Annotated[str, Meta(min_length=1, max_length=63)]
    even_if_busy: bool = False


class VerificationResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One verification of a KV transfer, by a decode worker (docs/contracts.md)."""

    outcome: Outcome
    decode: str  # its pods
    prefill: str = ""
    fault: Fault | None = None  # of one that failed
    message: str = ""  # of one that failed or is postponed
    transport: str = ""
    num_prompt_tokens: int = 0  # whose KV moved
    num_tokens: int = 0  # that were compared
    num_bytes: int = 0  # that arrived; 0 = the engine does not know
    bytes_per_second: int = 0  # 0 = not measured
    has_checksum: bool = False  # both engines have summed up the blocks, and agree


decode_verify = msgspec.json.Decoder(VerifyCall).decode
