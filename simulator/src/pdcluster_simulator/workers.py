"""Simulated workers: an engine each, what its role keeps beside it, and what it reports."""

from dataclasses import dataclass, field
from enum import Enum

from pdcluster_simulator.engine import SimulatedEngine
from pdcluster_simulator.requests import EngineWork, SimulatedRequest
from pdcluster_worker.messages.peers import WorkerLoad
from pdcluster_worker.routing.active_load import Charges
from pdcluster_worker.routing.credits import CreditLedger
from pdcluster_worker.routing.decode_costs import DecodeCandidate
from pdcluster_worker.routing.prefill_choice import REQUESTING_HEADS, CreditQueue, LinkRates
from pdcluster_worker.routing.qos.averages import Averages, Meter
from pdcluster_worker.routing.ttft import SloFeedback, TtftEstimates


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True)
class Counted:
    """Sums of an ingress since it began, from which rates are made."""

    requests: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True, eq=False)
class ClusterWorker:
    """since: time of its last change of state; load: its last report; pool: (role, name) as whose
    worker it serves; home: that of its StatefulSet; next_pool: the one that it takes once drained.

    One that prefills, or has, has the ledger; the others have the queue of requests without a
    credit, the requests that wait for blocks, and the state of a worker's own policies.
    """

    key: str
    pool: tuple[str, str]
    ordinal: int
    gpu: str
    num_gpus: int
    state: WorkerState
    since: float
    ledger: CreditLedger | None = None
    home: tuple[str, str] = field(init=False)
    next_pool: tuple[str, str] | None = None
    engine: SimulatedEngine = field(init=False)
    load: WorkerLoad = field(default_factory=WorkerLoad)
    charges: Charges = field(default_factory=Charges)
    candidate: DecodeCandidate = field(init=False)
    credit_queue: CreditQueue = field(default_factory=CreditQueue)
    pending: dict[str, "PendingRequest"] = field(default_factory=dict)
    short_of_blocks: list["PendingRequest"] = field(default_factory=list)
    estimates: TtftEstimates = field(default_factory=TtftEstimates)
    feedback: SloFeedback = field(default_factory=SloFeedback)
    link_rates: LinkRates = field(default_factory=LinkRates)
    meter: Meter = field(init=False)
    averages: Averages = field(default_factory=Averages)
    counted: Counted = field(default_factory=Counted)
    num_active: int = 0  # requests that it has in hand
    num_decoding: int = 0
    num_waiting: int = 0  # for their first token
    waiting_tokens: int = 0
    link_free: float = 0.0  # when its link has sent and received all

    def __post_init__(self) -> None:
        self.candidate = DecodeCandidate(self.key)
        self.home = self.pool

    @property
    def role(self) -> str:
        return self.pool[0]

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def ends(self) -> bool:
        """Return whether it drains to go, and not to take another role."""
        return self.state is WorkerState.DRAINING and self.next_pool is None

    def measured(self) -> WorkerLoad:
        """Its load now."""
        engine, queue, ledger = self.engine, self.credit_queue, self.ledger
        num_short, short_tokens = self.waiting_for_blocks
        return WorkerLoad(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting + num_short,
            waiting_tokens=engine.waiting_tokens + short_tokens,
            credit_queue_requests=queue.num_requests - num_short,
            credit_queue_tokens=queue.num_tokens - short_tokens,
            free_blocks=engine.num_free_blocks,
            total_blocks=engine.settings.num_blocks,
            credit_tokens=0 if ledger is None else ledger.outstanding_tokens,
        )

    @property
    def waiting_for_blocks(self) -> tuple[int, int]:
        """Requests of its credit queue that wait for its own blocks, and their tokens: all of them
        where each one that may request a credit does.
        """
        short, queue = self.short_of_blocks, self.credit_queue
        if short and len(short) >= min(REQUESTING_HEADS, queue.num_requests):
            known = {each.request.request_id for each in short}
            if known.issuperset(queue.heads(REQUESTING_HEADS)):
                return queue.num_requests, queue.num_tokens
        return len(short), sum(each.request.prompt_tokens for each in short)

    def report(self) -> None:
        """Make `load`, and what follows from it, that of now."""
        self.load = load = self.measured()
        self.charges = charges_of(load, load.num_requests)
        self.candidate = self.candidate_of(self.charges)

    def candidate_of(
        self, charges: Charges, *, is_self: bool = False, matched_blocks: int = 0
    ) -> DecodeCandidate:
        return DecodeCandidate(
            key=self.key,
            num_requests=charges.num_requests,
            is_self=is_self,
            matched_blocks=matched_blocks,
            prefill_tokens=charges.prefill_tokens,
            decode_blocks=charges.decode_blocks,
            total_blocks=self.load.total_blocks,
        )


def charges_of(load: WorkerLoad, num_requests: int) -> Charges:
    waiting = load.waiting_tokens + load.credit_queue_tokens
    return Charges(num_requests, waiting, max(0, load.total_blocks - load.free_blocks))


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request at its decode worker.

    sent_at: when its prompt was sent to the side that computes it
    work:    of the decode engine; prefill_work: of the prefill engine
    claimed: prefill workers that were asked for a credit and have not granted one
    queue_seconds: until an engine began its prompt
    """

    request: SimulatedRequest
    worker: ClusterWorker
    uncached_tokens: int = 0
    sent_at: float = 0.0
    others: int = 0
    num_workers: int = 0
    work: EngineWork | None = None
    prefill: ClusterWorker | None = None
    prefill_work: EngineWork | None = None
    claimed: list[ClusterWorker] = field(default_factory=list)
    needed_blocks: int = 0
    queue_seconds: float = 0.0
    fault: str = ""
    has_left: bool = False
    is_waiting: bool = False  # at its worker, for its first token

    @property
    def is_idle(self) -> bool:
        """True if it waits for a credit that nothing was done for yet."""
        return not self.claimed and not self.needed_blocks and self.prefill is None
