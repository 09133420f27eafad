"""Types that cross between peers, dispatch and server."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from pdcluster_worker.messages.facts import KVGeometry, PeerFacts
from pdcluster_worker.messages.requests import Token

PrefillMode = Literal["auto", "local", "remote"]
"""Place where a client wants the prefill: its extension field `pdcluster.prefill`."""

PrefillPlace = Literal["local", "remote"]
"""Place where the first token was made."""


Fact = str | int | float | bool


class PeerEvent(msgspec.Struct, frozen=True, gc=False):
    """Decision or action of a worker about a request of a peer; seconds: of the reader's
    `time.monotonic`.

    worker: its pod; "" on the way out.
    """

    name: str
    seconds: float
    facts: dict[str, Fact]
    worker: str = ""


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
    notes: tuple[PeerEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a worker, as it reports it to its peers about once a second; fields as in
    worker.proto.

    state:                that of its record, or stalled.
    progress:             grows with each step of its engine and each byte of KV that it has sent.
    longest_step_seconds: of its engine, recently.
    credit_tokens:        of a prefill worker: promised, or in hand.
    """

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    credit_queue_requests: int = 0
    credit_queue_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    state: str = "ready"
    progress: int = 0
    longest_step_seconds: float = 0.0
    credit_tokens: int = 0
    busy_ratio: float = 0.0
    memory_bandwidth_ratio: float = 0.0

    @property
    def num_requests(self) -> int:
        """Requests on the worker: running, waiting for its engine, or for a credit."""
        return self.num_running + self.num_waiting + self.credit_queue_requests


@dataclass(frozen=True, slots=True)
class Report:
    """One message of a Watch: load, and changes of the prefix cache; a snapshot's `stored` is the
    whole cache.
    """

    load: WorkerLoad
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False

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


@dataclass(frozen=True, slots=True)
class Hello:
    """Handshake of one worker with another; weights is a fingerprint, `facts` is what is compared.

    operations: see `PeerFacts`.
    max_model_len, vocab_size: limits of a request; 0 of a router.
    max_batched_tokens: of one step of all its engines together; 0 = unknown.
    restarts_grammar: see `EngineReady`.
    """

    engine_id: str
    role: str
    geometry: KVGeometry
    weights: str
    revision: str
    tensor_parallel_size: int = 1
    operations: str = ""
    model: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    max_batched_tokens: int = 0
    restarts_grammar: bool = False

    @property
    def facts(self) -> PeerFacts:
        """The part that two workers compare."""
        has_engine = self.role != "router"
        facts = PeerFacts(
            self.geometry, self.weights, self.revision, self.tensor_parallel_size, self.operations
        )
        return replace(facts, model=self.model, has_engine=has_engine)
