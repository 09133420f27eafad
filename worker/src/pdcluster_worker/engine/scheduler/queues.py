"""The requests that a scheduler knows, in order, and what can be counted of them."""

import logging
from bisect import insort_left, insort_right

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.block_policy import BlockPolicy, OnDemand
from pdcluster_worker.engine.scheduler.order import is_decode, num_uncomputed, order_of
from pdcluster_worker.engine.validation import too_large
from pdcluster_worker.engine.window import most_blocks
from pdcluster_worker.messages.engine_settings import EngineSettings

logger = logging.getLogger(__name__)


class Queues:
    """Requests that wait for a seat or hold one; the state of every scheduler.

    waiting: hold no blocks, in `order.waiting`.
    ready:   hold received KV and wait for a seat only, in `order.running`.
    running: hold a seat, in `order.running`.
    block_policy: what a request takes at its admission.
    """

    def __init__(
        self,
        settings: EngineSettings,
        tables: BlockTables,
        block_policy: BlockPolicy | None = None,
    ) -> None:
        self.waiting: list[EngineRequest] = []
        self.ready: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.num_preemptions = 0
        self.settings = settings
        self.tables = tables
        self.block_policy: BlockPolicy = block_policy or OnDemand()
        self.order = order_of(settings.scheduler.policy)

    @property
    def num_requests(self) -> int:
        """Requests that could be scheduled, now or later."""
        return len(self.waiting) + len(self.ready) + len(self.running)

    @property
    def is_prefilling(self) -> bool:
        """True if a running request has prompt left to compute."""
        return not all(is_decode(request) for request in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed by requests that are not past their prefill."""
        waiting = sum(request.num_tokens for request in self.waiting)
        prefills = (request for request in self.running if not is_decode(request))
        return waiting + sum(num_uncomputed(request) for request in prefills)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that newcomers from outside must leave to the requests that are here.

        Those to grow by, and the room of the first waiting request.
        """
        growing = self.block_policy.num_growing_blocks(len(self.running) + len(self.ready))
        if not self.waiting:
            return growing
        return growing + most_blocks(self.block_policy.num_tokens(self.waiting[0]), self.settings)

    @property
    def computing(self) -> list[EngineRequest]:
        """Running requests with a token for the next step: all but those whose last one is under
        way, or that wait for it.
        """
        return [
            request for request in self.running if not (request.is_ending or request.is_waiting)
        ]

    @property
    def has_free_slot(self) -> bool:
        """True if one more request may run."""
        return len(self.running) < self.settings.max_sequences

    @property
    def last_in_order(self) -> EngineRequest:
        """The request to take blocks from, of all that hold some."""
        last = [queue[-1] for queue in (self.running, self.ready) if queue]
        return max(last, key=self.order.running)

    @property
    def preemption_victim(self) -> EngineRequest | None:
        """The next one that makes way for the first waiting request; None where none does.

        Under `preemptive`: the last in order, if that has lower priority, computes for no peer, and
        what such requests hold is enough.
        """
        if (
            self.settings.scheduler.policy != "preemptive"
            or not self.waiting
            or not (self.running or self.ready)
        ):
            return None
        first = self.waiting[0]
        if too_large(first.num_tokens, self.settings) is not None:
            return None
        needed = self.tables.reservation(first, self.block_policy.num_tokens(first)).num_needed
        if self.has_free_slot and needed <= self.tables.pool.num_available:
            return None
        lower = [
            each
            for each in (*self.running, *self.ready)
            if each.priority > first.priority and each.target is None
        ]
        held = sum(len(each.block_table) for each in lower)
        return (
            self.last_in_order
            if self.last_in_order in lower and needed <= self.tables.pool.num_available + held
            else None
        )

    def preempt_for_priority(self) -> None:
        """Preempt all that make way for the first waiting request; between two steps, none of them
        under way.
        """
        while (request := self.preemption_victim) is not None:
            self.requeue(request)

    def requeue(self, request: EngineRequest) -> None:
        """Take the blocks of a request, and queue it again, before those that never ran."""
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

    def add(self, request: EngineRequest) -> None:
        """Queue a request that holds no blocks.

        One that lost its blocks (PREEMPTED) goes before those that never ran.
        """
        insort = insort_left if request.status is Status.PREEMPTED else insort_right
        insort(self.waiting, request, key=self.order.waiting)

    def add_ready(self, request: EngineRequest) -> None:
        """Queue a request whose KV is in its blocks; it is seated before others are admitted."""
        insort_right(self.ready, request, key=self.order.running)

    def remove(self, request: EngineRequest) -> None:
        """Forget a request, wherever it stands; its blocks stay its own.

        Unknown requests are a no-op.
        """
        for queue in (self.running, self.ready, self.waiting):
            if request in queue:
                queue.remove(request)

    def completed(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step; most schedulers go by no times."""
