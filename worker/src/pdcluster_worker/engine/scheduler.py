"""Continuous batching: who computes how many tokens in the next step.

One rule for prefill and decode [V1]: a request's work is its known tokens less
the computed ones.  Running requests first (decodes, then unfinished prefills),
then, only if nothing was preempted, waiting ones, under a token budget and a
bound on running requests [V2].  A waiting request is admitted only when all its
known tokens find room, which it takes at once [V7], so only decodes ever grow.
Guarantees that a schedule either makes progress or changes nothing.  Requests
that receive KV or send it are not here.
"""

import logging
from bisect import insort_left, insort_right
from dataclasses import dataclass, field

from pdcluster_worker.engine.acceptance import too_large
from pdcluster_worker.engine.batch import Batch, Scheduled
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import Request, Status
from pdcluster_worker.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Schedule:
    """One step's plan while it is made, and its outcome.

    seated:   got a seat in this step, for the first time or again.
    admitted: those of them that waited, and compute their prompt in this step.
    started:  those of them that were admitted from waiting for the first time.
    failed:   can never run, with the reason; nothing here holds or knows them any more.
    """

    budget: int
    items: dict[Request, Scheduled] = field(default_factory=dict)
    seated: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)

    @property
    def batch(self) -> Batch:
        """What the runner is to execute; may be empty."""
        return Batch(tuple(self.items.values()))

    @property
    def progressed(self) -> bool:
        """Whether the next schedule could differ from this one."""
        return bool(self.items or self.preempted or self.failed)

    def add(self, request: Request) -> None:
        """Spend budget on as many of the request's tokens as it allows."""
        num_tokens = min(len(request.tokens) - request.num_computed_tokens, self.budget)
        self.items[request] = Scheduled(request, num_tokens)
        self.budget -= num_tokens


class Scheduler:
    """Requests that wait for a seat or hold one.

    waiting: hold no blocks.  Order: priority, then preempted ones, then arrival, so a
             preempted request goes to the front of its priority [V5].
    ready:   hold received KV and wait for a seat only.
    running: hold a seat; sorted by (priority, arrival), so the victim of a preemption is the last [V5], [V6].
    """

    def __init__(self, settings: EngineSettings, tables: BlockTables) -> None:
        self.waiting: list[Request] = []
        self.ready: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._settings = settings
        self._tables = tables

    @property
    def num_requests(self) -> int:
        """Requests that could be scheduled, now or later."""
        return len(self.waiting) + len(self.ready) + len(self.running)

    @property
    def is_prefilling(self) -> bool:
        """Whether a running request has prompt left to compute."""
        return any(not _is_decode(request) for request in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to be computed by waiting requests and by running ones that are not past their prefill."""
        waiting = sum(request.num_tokens for request in self.waiting)
        return waiting + sum(_num_uncomputed(request) for request in self.running if not _is_decode(request))

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that newcomers from outside must leave: one to grow for each seat, and the room of the first waiting request."""
        first = self._tables.num_blocks(self.waiting[0].num_tokens) if self.waiting else 0
        return len(self.running) + len(self.ready) + first

    def add(self, request: Request) -> None:
        """Queue a request that holds no blocks; one that lost its blocks (PREEMPTED) goes before those that never ran."""
        insort = insort_left if request.status is Status.PREEMPTED else insort_right
        insort(self.waiting, request, key=_waiting_order)

    def add_ready(self, request: Request) -> None:
        """Queue a request whose KV is in its blocks; it is seated before anyone is admitted."""
        insort_right(self.ready, request, key=_running_order)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands; its blocks stay its own.  Unknown requests are a no-op."""
        for queue in (self.running, self.ready, self.waiting):
            if request in queue:
                queue.remove(request)

    def schedule(self, *, admit: bool = True) -> Schedule:
        """Plan the next step; every scheduled token has its block when this returns.

        admit: whether waiting requests may be let in; those that run go on either way.
        """
        step = Schedule(self._settings.max_batched_tokens)
        self._seat_ready(step)
        for request in _decodes_first(self.running):
            if step.budget == 0:
                break
            if request.status is Status.RUNNING:
                self._schedule_running(request, step)
        if admit and not step.preempted:
            self._admit(step)
        return step

    def _seat_ready(self, step: Schedule) -> None:
        while self.ready and len(self.running) < self._settings.max_sequences:
            self._seat(self.ready.pop(0), step)

    def _seat(self, request: Request, step: Schedule) -> None:
        request.status = Status.RUNNING
        insort_right(self.running, request, key=_running_order)
        step.seated.append(request)

    def _schedule_running(self, request: Request, step: Schedule) -> None:
        end = min(len(request.tokens), request.num_computed_tokens + step.budget)
        while not self._tables.grow(request, end):
            if (reason := too_large(request.num_tokens, self._settings)) is not None:
                self._fail(request, reason, step)
                return
            victim = self._victim()
            self._preempt(victim, step)
            if victim is request:
                return
        step.add(request)

    def _admit(self, step: Schedule) -> None:
        while self.waiting and step.budget > 0 and len(self.running) < self._settings.max_sequences:
            request = self.waiting[0]
            if (reason := too_large(request.num_tokens, self._settings)) is not None:
                self._fail(request, reason, step)
                continue
            reservation = self._tables.reservation(request, request.num_tokens)
            if reservation.num_needed > self._tables.pool.num_available:
                break
            self.waiting.pop(0)
            self._tables.take(request, reservation)
            if request.status is Status.WAITING:
                request.num_cached_tokens = request.num_computed_tokens
                step.started.append(request)
            self._seat(request, step)
            step.admitted.append(request)
            step.add(request)

    def _victim(self) -> Request:
        last = [queue[-1] for queue in (self.running, self.ready) if queue]
        return max(last, key=_running_order)

    def _preempt(self, request: Request, step: Schedule) -> None:
        # Only decodes grow and they are planned in the order of `running`, so its last is planned last.
        assert request not in step.items, f"request {request.request_id} is preempted after it was scheduled"
        self.remove(request)
        step.preempted.append(request)
        self.num_preemptions += 1
        logger.info("preempted request=%s blocks=%d tokens=%d", request.request_id, len(request.block_table), request.num_tokens)
        self._tables.release(request)
        request.status = Status.PREEMPTED
        self.add(request)

    def _fail(self, request: Request, reason: str, step: Schedule) -> None:
        self.remove(request)
        self._tables.release(request)
        step.failed.append((request, reason))


def _num_uncomputed(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


def _is_decode(request: Request) -> bool:
    num_tokens = len(request.tokens)
    return num_tokens > request.num_prompt_tokens and num_tokens - request.num_computed_tokens == 1


def _decodes_first(requests: list[Request]) -> list[Request]:
    decodes = [request for request in requests if _is_decode(request)]
    if len(decodes) == len(requests):
        return decodes
    return [*decodes, *(request for request in requests if not _is_decode(request))]


def _running_order(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_seconds


def _waiting_order(request: Request) -> tuple[int, bool, float]:
    return request.priority, request.status is not Status.PREEMPTED, request.arrival_seconds
