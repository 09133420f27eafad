"""The requests that a scheduler knows, in order, and what can be counted of them."""

from bisect import insort_left, insort_right

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import Request, Status
from pdcluster_worker.engine.scheduler.order import (
    is_decode,
    num_uncomputed,
    running_order,
    waiting_order,
)
from pdcluster_worker.engine.settings import EngineSettings


class Queues:
    """Requests that wait for a seat or hold one.

    waiting: hold no blocks, in `waiting_order`.
    ready:   hold received KV and wait for a seat only, in `running_order`.
    running: hold a seat, in `running_order`, so the victim of a preemption is the last [V5], [V6].
    """

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        self.waiting: list[Request] = []
        self.ready: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.settings = settings
        self.tables = tables

    @property
    def num_requests(self) -> int:
        """Requests that could be scheduled, now or later."""
        return len(self.waiting) + len(self.ready) + len(self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed by requests that are not past their prefill."""
        waiting = sum(request.num_tokens for request in self.waiting)
        prefills = (request for request in self.running if not is_decode(request))
        return waiting + sum(num_uncomputed(request) for request in prefills)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that newcomers from outside must leave to the requests that are here.

        One to grow for each seat, and the room of the first waiting request.
        """
        first = self.tables.num_blocks(self.waiting[0].num_tokens) if self.waiting else 0
        return len(self.running) + len(self.ready) + first

    @property
    def has_free_seat(self) -> bool:
        """Whether one more request may run [V2]."""
        return len(self.running) < self.settings.max_sequences

    def add(self, request: Request) -> None:
        """Queue a request that holds no blocks.

        One that lost its blocks (PREEMPTED) goes before those that never ran.
        """
        insort = insort_left if request.status is Status.PREEMPTED else insort_right
        insort(self.waiting, request, key=waiting_order)

    def add_ready(self, request: Request) -> None:
        """Queue a request whose KV is in its blocks; it is seated before others are admitted."""
        insort_right(self.ready, request, key=running_order)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands; its blocks stay its own.

        Unknown requests are a no-op.
        """
        for queue in (self.running, self.ready, self.waiting):
            if request in queue:
                queue.remove(request)
