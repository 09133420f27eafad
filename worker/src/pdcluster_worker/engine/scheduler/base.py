"""Base of all schedulers: queues in order, admission, preemption, and the plan of a step."""

import logging
from abc import ABC, abstractmethod
from bisect import insort_left, insort_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdcluster_worker.engine.block_table import BlockTables, most_blocks, too_large
from pdcluster_worker.engine.ports import Grammars
from pdcluster_worker.engine.request import Batch, EngineRequest, Order, Scheduled, Status
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine_settings import EngineSettings

logger = logging.getLogger(__name__)


def num_uncomputed(request: EngineRequest) -> int:
    """Tokens that the next step can compute: those known by then, less those computed by then."""
    return request.num_planned_tokens - request.num_scheduled_tokens


def is_decode(request: EngineRequest) -> bool:
    """Return whether only the request's newest output token is uncomputed."""
    return request.num_planned_tokens > request.num_prompt_tokens and num_uncomputed(request) == 1


def by_kind(requests: list[EngineRequest]) -> tuple[list[EngineRequest], list[EngineRequest]]:
    decodes = [request for request in requests if is_decode(request)]
    if len(decodes) == len(requests):
        return decodes, []
    return decodes, [request for request in requests if not is_decode(request)]


@dataclass(slots=True)
class Schedule:
    budget: int  # tokens that may still be scheduled
    items: dict[EngineRequest, Scheduled] = field(default_factory=dict)
    # Got a slot in this step, for the first time or again.
    newly_running: list[EngineRequest] = field(default_factory=list)
    # Those of them that were admitted from waiting for the first time.
    started: list[EngineRequest] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)
    # Those of them that waited, and compute their prompt in this step.
    admitted: list[EngineRequest] = field(default_factory=list)
    # Can never run, with the reason; nothing here holds or knows them any more.
    failed: list[tuple[EngineRequest, str]] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        return Batch(tuple(self.items.values()))

    @property
    def progressed(self) -> bool:
        return bool(self.items or self.preempted or self.failed)

    def add(self, request: EngineRequest, limit: int | None = None) -> Scheduled:
        """Spend budget on as many of the request's tokens as it allows, `limit` at most."""
        most = self.budget if limit is None else min(self.budget, limit)
        num_tokens = min(num_uncomputed(request), most)
        item = self.items[request] = Scheduled.of(request, num_tokens)
        self.budget -= num_tokens
        return item


class Scheduler(ABC):
    """Requests that wait for a slot or have one, not those that receive KV or send it; the plan of
    each step.
    """

    # A request takes blocks for the longest that it can become, as in Orca, so that none is ever
    # preempted; else for its known tokens, and one more whenever the last is full, as in vLLM.
    reserves_max = False

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        self.waiting: list[EngineRequest] = []  # hold no blocks, in `order.waiting`
        # Hold received KV and wait for a slot only, in `order.running`.
        self.ready: list[EngineRequest] = []
        self.running: list[EngineRequest] = []  # have a slot, in `order.running`
        self.num_preemptions = 0
        self.settings = settings
        self.tables = tables
        self.order = Order(settings.scheduler.policy)

    @abstractmethod
    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan a step with a block for every token; makes progress or changes nothing.

        admit: False = no waiting request is admitted in this step.
        """

    # B027: most schedulers go by no times.
    def completed(self, num_tokens: int, seconds: float) -> None:  # noqa: B027
        """A step of so many tokens took so long, from its schedule to its last token."""

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + len(self.ready) + len(self.running)

    @property
    def is_prefilling(self) -> bool:
        return not all(is_decode(request) for request in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed by requests that are not past their prefill."""
        waiting = sum(request.num_tokens for request in self.waiting)
        prefills = (request for request in self.running if not is_decode(request))
        return waiting + sum(num_uncomputed(request) for request in prefills)

    def num_admission_tokens(self, request: EngineRequest) -> int:
        """Tokens that a request takes blocks for at its admission, at least all that are known."""
        known = len(request.tokens)
        if not self.reserves_max or request.target is not None:  # which makes no further token here
            return known
        settings = self.settings
        longest = request.num_prompt_tokens + request.sampling.max_tokens
        capacity = settings.num_blocks * settings.block_size
        return max(known, min(longest, settings.max_model_len, capacity))

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that prompts which run have yet to take."""
        return 0

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks to grow by, and those of the first waiting request: not for newcomers."""
        growing = 0 if self.reserves_max else len(self.running) + len(self.ready)
        if not self.waiting:
            return growing
        return growing + most_blocks(self.num_admission_tokens(self.waiting[0]), self.settings)

    @property
    def computing(self) -> list[EngineRequest]:
        return [
            request for request in self.running if not (request.is_ending or request.is_waiting)
        ]

    @property
    def has_free_slot(self) -> bool:
        return len(self.running) < self.settings.max_sequences

    @property
    def last_in_order(self) -> EngineRequest:
        last = [queue[-1] for queue in (self.running, self.ready) if queue]
        return max(last, key=self.order.running)

    # --- queues -------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request that holds no blocks; a PREEMPTED one before those that never ran."""
        insort = insort_left if request.status is Status.PREEMPTED else insort_right
        insort(self.waiting, request, key=self.order.waiting)

    def add_ready(self, request: EngineRequest) -> None:
        """Queue a request whose KV is in its blocks; it starts before others are admitted."""
        insort_right(self.ready, request, key=self.order.running)

    def defer(self, groups: Iterable[str], *, evicts: bool) -> None:
        """Requests of these groups, and of no others, go behind those of their priority."""
        self.order.defer(groups, evicts=evicts)
        self.waiting.sort(key=self.order.waiting)
        self.ready.sort(key=self.order.running)
        self.running.sort(key=self.order.running)

    def remove(self, request: EngineRequest) -> None:
        """Forget a request, in whatever queue; its blocks stay its own.  Unknown: a no-op."""
        for queue in (self.running, self.ready, self.waiting):
            if request in queue:
                queue.remove(request)

    # --- admission ----------------------------------------------------------------------------

    def start_ready(self, step: Schedule) -> None:
        while self.ready and self.has_free_slot:
            self._start_running(self.ready.pop(0), step)

    def admit(self, step: Schedule, *, whole: bool = False, limit: int | None = None) -> None:
        """Start waiting requests in order while budget, slots and blocks last.

        whole: only if the step has budget for all its uncomputed tokens.  limit: most in this step.
        """
        tables = self.tables
        while step.budget > 0 and (request := self.first_waiting(step)) is not None:
            reservation = tables.reservation(request, self.num_admission_tokens(request))
            if reservation.num_needed > tables.pool.num_available:
                return
            if whole and request.num_tokens - reservation.num_computed_tokens > step.budget:
                return
            tables.take(request, reservation)
            self.start_first(request, step)
            step.add(request, limit)

    def first_waiting(self, step: Schedule) -> EngineRequest | None:
        """The next request to admit, if there is a slot; fails those that can never run."""
        while self.waiting and self.has_free_slot:
            request = self.waiting[0]
            if not self.fails_for_size(request, step):
                return request
        return None

    def start_first(self, request: EngineRequest, step: Schedule) -> None:
        self.waiting.pop(0)
        if request.status is Status.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            step.started.append(request)
        step.admitted.append(request)
        self._start_running(request, step)

    def _start_running(self, request: EngineRequest, step: Schedule) -> None:
        request.status = Status.RUNNING
        insort_right(self.running, request, key=self.order.running)
        step.newly_running.append(request)

    # --- running requests ---------------------------------------------------------------------

    def schedule_chunks(
        self, prefills: list[EngineRequest], step: Schedule, limit: int | None = None
    ) -> None:
        for request in prefills:
            if step.budget == 0:
                return
            if request.status is not Status.RUNNING:  # a decode has preempted it
                continue
            num_tokens = self.num_tokens_with_blocks(request)
            if num_tokens > 0:
                item = step.add(request, num_tokens if limit is None else min(limit, num_tokens))
                self.tables.grow(request, item.end)
            else:
                assert request.num_in_flight_tokens, (
                    f"request {request.request_id} lacks blocks that it was admitted for"
                )

    def num_tokens_with_blocks(self, request: EngineRequest) -> int:
        """Tokens of its next chunk that find blocks.  Those that leave its window by a step in
        flight come back when that step ends.
        """
        num_blocks = len(request.block_table) + self.tables.num_available_to(request)
        return num_blocks * self.settings.block_size - request.num_scheduled_tokens

    def decode_or_preempt(self, requests: list[EngineRequest], step: Schedule) -> None:
        """Schedule a token of each decode, at the cost of the last in order if blocks are short."""
        for request in requests:
            if step.budget == 0:
                return
            if request.status is Status.RUNNING and self.grow_or_preempt(request, step):
                step.add(request)

    def grow_or_preempt(self, request: EngineRequest, step: Schedule) -> bool:
        """Extend to the known tokens, preempting the last in order; False if that is itself."""
        while not self.tables.grow(request, request.num_planned_tokens):
            if self.fails_for_size(request, step):
                return False
            victim = self.last_in_order
            self.preempt(victim, step)
            if victim is request:
                return False
        return True

    # --- preemption: a victim starts over, its output kept ------------------------------------

    def preempt(self, request: EngineRequest, step: Schedule) -> None:
        """Take the request's blocks for another one, in the middle of a plan."""
        # Requests preempt in the order of `running`, so the last in order is planned last.
        assert request not in step.items, (
            f"request {request.request_id} is preempted after its turn"
        )
        assert not request.num_in_flight_tokens, (
            f"request {request.request_id} is preempted in the middle of a step"
        )
        step.preempted.append(request)
        self._requeue(request)

    def fails_for_size(self, request: EngineRequest, step: Schedule) -> bool:
        """Give up a request that the whole pool could not hold; it holds nothing afterwards."""
        reason = too_large(request.num_tokens, self.settings)
        if reason is None:
            return False
        self.remove(request)
        self.tables.release(request)
        step.failed.append((request, reason))
        return True

    @property
    def preemption_victim(self) -> EngineRequest | None:
        """The next running request that makes way for the first waiting one: its priority is lower
        (`preemptive`), or its group is deferred.
        """
        if not self.order.preempts or not self.waiting or not (self.running or self.ready):
            return None
        first = self.waiting[0]
        if too_large(first.num_tokens, self.settings) is not None:
            return None
        needed = self.tables.reservation(first, self.num_admission_tokens(first)).num_needed
        if self.has_free_slot and needed <= self.tables.pool.num_available:
            return None
        lower = [
            each
            for each in (*self.running, *self.ready)
            if self.order.makes_way(each, first) and each.target is None
        ]
        held = sum(len(each.block_table) for each in lower)
        is_enough = needed <= self.tables.pool.num_available + held
        return max(lower, key=self.order.running) if lower and is_enough else None

    def preempt_for_priority(self) -> None:
        """Preempt all that make way for the first waiting request; no step has them in flight."""
        while (request := self.preemption_victim) is not None:
            self._requeue(request)

    def _requeue(self, request: EngineRequest) -> None:
        self.remove(request)
        self.num_preemptions += 1
        logger.info(
            "preempted request=%s blocks=%d tokens=%d",
            request.request_id,
            len(request.block_table),
            request.num_tokens,
        )
        self.tables.release(request)
        request.status = Status.PREEMPTED
        self.add(request)


class GrammarQueue:
    """Requests whose constraint is being compiled; they hold no slot, and others go on."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler) -> None:
        self.grammars = grammars
        self._scheduler = scheduler
        self.waiting: dict[str, EngineRequest] = {}  # by request id

    def add(self, request: EngineRequest) -> None:
        """Begin to compile the request's constraint, if it has one."""
        if request.sampling.constraint is not None:
            self.grammars.begin(request)
            self.waiting[request.request_id] = request

    def enter(self, request: EngineRequest) -> None:
        self.add(request)
        self.queue(request)

    def queue(self, request: EngineRequest) -> None:
        """A request waits for a slot, unless it waits for its grammar still."""
        if request.request_id in self.waiting:
            return
        if request.block_table:  # with its KV in them
            self._scheduler.add_ready(request)
        else:
            self._scheduler.add(request)

    def settle(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Queue those whose grammar is done, unless KV is still received; each with its error."""
        done: list[tuple[EngineRequest, RequestError | None]] = []
        for request in list(self.waiting.values()):
            answer = self.grammars.open(request)
            if not answer:
                continue
            del self.waiting[request.request_id]
            error = answer if isinstance(answer, RequestError) else None
            done.append((request, error))
            if error is None and request.status is not Status.RECEIVING:
                self.queue(request)
        return done
