"""Messages between workers: MessagePack in the calls of `peers.calls`."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry, PeerFacts
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
    """Decision or action about a request.  seconds: of the reader's `time.monotonic`.

    Thousands are kept, out of sight of the garbage collector: facts hold no other object.
    """

    name: str
    seconds: float
    facts: dict[str, Fact]
    worker: str = ""  # its pod; "" = this one


class Generated(msgspec.Struct, frozen=True):
    """One token of one choice.

    prefill, degraded: on a choice's first token: where it was made, and what the choice lost under
                       load.
    notes:             of the peer that made it.
    """

    token: Token
    prefill: PrefillPlace | None = None
    index: int = 0
    degraded: tuple[str, ...] = ()
    notes: tuple[TraceEvent, ...] = ()


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Load of a worker, of all its engines together, reported about once a second.

    credit_queue_requests, credit_queue_tokens: of a decode worker: requests that wait for a credit.
    state:                  that of its record, or stalled.
    progress:               grows with each engine step and each byte of KV sent.
    longest_step_seconds:   of its engines so far.
    credit_tokens:          of a prefill worker: promised, or being computed.
    busy_ratio:             share of time in which the GPU, else the engine, computes.
    memory_bandwidth_ratio: share of time in which the GPU moves memory; 0 = not measured.
    """

    num_running: Count = 0
    num_waiting: Count = 0
    waiting_tokens: Count = 0
    credit_queue_requests: Count = 0
    credit_queue_tokens: Count = 0
    free_blocks: Count = 0
    total_blocks: Count = 0
    state: str = "ready"
    progress: Count = 0
    longest_step_seconds: Amount = 0.0
    credit_tokens: Count = 0
    busy_ratio: Amount = 0.0
    memory_bandwidth_ratio: Amount = 0.0

    @property
    def num_requests(self) -> int:
        """Requests on the worker: running, waiting for its engine, or for a credit."""
        return self.num_running + self.num_waiting + self.credit_queue_requests


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a Watch: load, and changes of the prefix cache; a snapshot's `stored` is the
    whole cache.

    sequence: one more each; after a gap the reader subscribes again.
    """

    load: WorkerLoad
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False
    sequence: Count = 0

    def parts(self, max_hashes: int) -> Iterator["Report"]:
        """The same as reports of at most so many hashes each, to be taken in this order.

        All that is stored comes before what is removed: a hash in both ends as removed.
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
    """Handshake of one worker with another; weights is a fingerprint, `facts` is what is compared.

    operations: as in `PeerFacts`.
    max_model_len, vocab_size: limits of a request; 0 of a router.
    max_batched_tokens: of one step of all its engines together; 0 = unknown.
    restarts_grammar: as in `EngineReady`.
    """

    engine_id: Name
    role: str
    geometry: KVGeometry
    weights: str
    revision: str
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    operations: str = ""
    model: str = ""
    max_model_len: Count = 0
    vocab_size: Count = 0
    max_batched_tokens: Count = 0
    restarts_grammar: bool = False

    @property
    def facts(self) -> PeerFacts:
        """The part that two workers compare."""
        return PeerFacts(
            *(self.geometry, self.weights, self.revision, self.tensor_parallel_size),
            operations=self.operations,
            model=self.model,
            has_engine=self.role != "router",
        )


class PrefillCall(msgspec.Struct, frozen=True):
    """Prefill a request into `target`.

    engine_id: the prefill engine that it is meant for; another one refuses.
    worker_id: the decode worker that has the credit, as in its Hello; "" = the target's engine.
    """

    spec: RequestSpec
    engine_id: str
    target: TransferTarget
    worker_id: str = ""


class PrefillReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of both: the first token as soon as it is sampled, then the end of the transfer."""

    first_token: Token | None = None
    done: PrefillDone | None = None


class PushPrefix(msgspec.Struct, frozen=True):
    """Take the KV of a prefix, the prompt of `spec`; answered by a TransferTarget if there is room.

    engine_id: the prefill engine that it is meant for.  worker_id: the sender, as in its Hello.
    """

    engine_id: str
    worker_id: str
    spec: RequestSpec


class PrefixPushed(msgspec.Struct, frozen=True):
    """The KV is written."""

    first_token: Token
    done: PrefillDone


class OpenCredits(msgspec.Struct, frozen=True, tag=True):
    """First message of a decode worker's stream of credits, open as long as the pair lives; when it
    breaks, every unused credit is returned.
    """

    engine_id: Name


class ClaimCredit(msgspec.Struct, frozen=True, tag=True):
    """Ask for a credit; answered at once by granted or queued, a queued one by granted later."""

    request_id: str
    tokens: int
    priority: int


class ReleaseCredit(msgspec.Struct, frozen=True, tag=True):
    """A claim or a credit that is no longer needed."""

    request_id: str


class CreditReply(msgspec.Struct, frozen=True):
    """Answer to a claim."""

    request_id: str
    granted: bool


class WatchCall(msgspec.Struct, frozen=True):
    """Send load about once a second and changes of the prefix cache, a snapshot first."""

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
decode_watch = msgspec.msgpack.Decoder(WatchCall).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
