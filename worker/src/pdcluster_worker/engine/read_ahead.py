"""Requests whose prefix is read from the tiers below the pool before they are admitted.

A request leaves the waiting queue for that time and comes back to its place in it; others go on.
What was read is found in the prefix cache, and the rest is computed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pdcluster_worker.engine.kv_tiers import KVTiers
from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.engine.scheduler.base import Scheduler
from pdcluster_worker.engine.store_lookups import StoreLookups
from pdcluster_worker.engine.tier import Load, PrefixRun
from pdcluster_worker.engine.tier_rates import Rate, ReadEstimate
from pdcluster_worker.messages.engine import TIER_READS, EngineTotals
from pdcluster_worker.messages.requests import TierRead

logger = logging.getLogger(__name__)

LATE, LEAST_SECONDS, MOST_SECONDS = 2.0, 5.0, 60.0
"""A read is given up after so many times the seconds that computing takes, but not before the least
and, where these are not known, after the most.
"""


@dataclass(slots=True, eq=False)
class Reading:
    """A load, and the requests that wait for it."""

    load: Load
    estimate: ReadEstimate
    num_blocks: int  # that its first request takes when it is admitted, beyond those of the load
    # Oldest first, each with the call that resumes it.
    requests: dict[EngineRequest, Callable[[EngineRequest], None]] = field(default_factory=dict)


class ReadAhead:
    def __init__(self, scheduler: Scheduler, tiers: KVTiers, clock: Callable[[], float]) -> None:
        self.tiers = tiers
        self.lookups = StoreLookups(tiers, clock)
        self._block_size = scheduler.settings.block_size
        self._tables = scheduler.tables
        self._pool = scheduler.tables.pool
        self._scheduler = scheduler
        self._clock = clock
        self._token_rate = Rate()  # seconds to compute one token of a prompt
        self._measured = (0, 0.0)  # prompt tokens and their seconds that are in it
        self._readings: dict[Load, Reading] = {}
        self._waiting: dict[EngineRequest, Reading] = {}
        self.counts = dict.fromkeys(TIER_READS, 0)
        # Not read for again, unless they lose blocks: by the tokens that they had lost then.
        self._decided: dict[EngineRequest, int] = {}

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + self.lookups.num_requests

    @property
    def next_seconds(self) -> float | None:
        """In how many seconds waiting requests are computed unless blocks arrive, a tier counts as
        stuck, or the next part of a tier's hashes is reported.
        """
        if self._pool.prefix_cache.has_events:
            return 0.0
        due = (self.tiers.overdue_seconds, self.lookups.next_seconds)
        return min((seconds for seconds in due if seconds is not None), default=None)

    def advance(self, totals: EngineTotals) -> bool:
        """One turn; returns whether a block has moved, or a tier has failed or answers again.

        totals: of the engine's steps.
        """
        num_moves, reasons = self._pool.num_moves, self.tiers.reasons
        self._measure(totals)
        self._settle()
        for load in self.tiers.overdue():
            self._give_up(load)
        self.lookups.settle()
        self._schedule()
        return self._pool.num_moves != num_moves or self.tiers.reasons != reasons

    def _measure(self, totals: EngineTotals) -> None:
        num_tokens = totals.prefill_tokens - self._measured[0]
        if num_tokens > 0:
            seconds = totals.prefill_seconds - self._measured[1]
            self._token_rate.add(seconds / num_tokens, self._clock())
            self._measured = (totals.prefill_tokens, totals.prefill_seconds)

    def _schedule(self) -> None:
        """Take those from the queue that are to be read for, as many as slots are free."""
        scheduler = self._scheduler
        num_slots = scheduler.settings.max_sequences - len(scheduler.running)
        ahead: list[EngineRequest] = []
        for request in scheduler.waiting[:num_slots]:
            if self.begin(request, scheduler.add, partial(self._num_reserved, ahead)):
                scheduler.remove(request)
            elif self._is_decided(request):
                ahead.append(request)
            else:
                return  # there is no room for it now, and none is admitted before it

    def _num_reserved(self, ahead: Sequence[EngineRequest]) -> int:
        """Blocks that are left to prompts which run, and to those that are admitted before."""
        scheduler, tables = self._scheduler, self._tables
        num_reserved = scheduler.num_promised_blocks
        for request in ahead:
            if num_reserved >= self._pool.num_available:
                break
            own = tables.reservation(request, scheduler.num_admission_tokens(request))
            num_reserved += own.num_needed - tables.num_kept
        return num_reserved

    def begin(
        self,
        request: EngineRequest,
        resume: Callable[[EngineRequest], None],
        num_reserved: Callable[[], int] | None = None,
    ) -> bool:
        """Return whether the request waits for a read, after which it is resumed.

        False without a choice made: there is no room for its blocks now.
        num_reserved: blocks that are not for it; by default those that are for no newcomer.
        """
        if self._is_decided(request):
            return False
        if request.scores_prompt:
            self._decide(request)
            return False
        request.extend_hashes(self._block_size)
        limit = (request.num_tokens - 1) // self._block_size
        hits = self._pool.prefix_cache.match(request.block_hashes, limit)
        run = self.tiers.run(request.block_hashes, len(hits), limit)
        self.tiers.touch(request.block_hashes[:limit])
        unknown = request.block_hashes[len(run.hits) + len(run.keys) : limit]
        if run.load is None and self.lookups.begin(
            request, unknown, self._compute_seconds(len(unknown)), resume
        ):
            return True
        if not run.keys:
            if run.load is None:
                self._decide(request)
                return False
            self._wait(request, resume, self._readings[run.load])
            return True
        estimate = self._estimate(run)
        if not estimate.pays:
            self._decide(request)
            self.counts["computed"] += 1
            self._note(request, estimate, choice="compute")
            return False
        reserved = num_reserved() if num_reserved else self._scheduler.num_reserved_blocks
        reading = self._read(request, run, estimate, reserved)
        if reading is not None:
            self._wait(request, resume, reading)
        return reading is not None

    def _settle(self) -> None:
        """Resume requests whose read has ended, in any way."""
        for load in self.tiers.poll():
            reading = self._readings.pop(load)
            self._tables.num_awaited -= reading.num_blocks
            self._report(reading)
            for request, resume in reading.requests.items():
                del self._waiting[request]
                resume(request)

    def _give_up(self, load: Load) -> None:
        """Let all that wait for it be computed; its blocks are quarantined until answered."""
        reading = self._readings.pop(load)
        logger.warning("kv blocks were not read in time: their prefix is computed")
        self.counts["given_up"] += 1
        self._tables.num_awaited -= reading.num_blocks
        self.tiers.cancel(load)
        for request, resume in reading.requests.items():
            del self._waiting[request]
            self._decide(request)
            resume(request)

    def forget(self, request: EngineRequest) -> None:
        """It has ended: a read that no other waits for is cancelled."""
        self._decided.pop(request, None)
        self.lookups.forget(request)
        reading = self._waiting.pop(request, None)
        if reading is None:
            return
        del reading.requests[request]
        if not reading.requests:
            del self._readings[reading.load]
            self._tables.num_awaited -= reading.num_blocks
            self.tiers.cancel(reading.load)

    def save(self) -> None:
        """Begin to save new blocks; what requests are to grow by is left to them."""
        tables, scheduler = self._tables, self._scheduler
        reserved = tables.num_promised + scheduler.num_reserved_blocks + tables.num_awaited
        self.tiers.save(self._pool.num_available - reserved)

    def _is_decided(self, request: EngineRequest) -> bool:
        return self._decided.get(request) == request.num_lost_tokens

    def _decide(self, request: EngineRequest) -> None:
        self._decided[request] = request.num_lost_tokens

    def _read(
        self, request: EngineRequest, run: PrefixRun, estimate: ReadEstimate, num_reserved: int
    ) -> Reading | None:
        num_tokens = self._scheduler.num_admission_tokens(request)
        own = self._tables.reservation(request, num_tokens)
        if own.num_needed + num_reserved > self._pool.num_available:
            return None
        load = self.tiers.load(run)
        load.due = load.started + max(LEAST_SECONDS, LATE * estimate.compute or MOST_SECONDS)
        num_more = max(0, own.num_new - len(run.keys))
        reading = self._readings[load] = Reading(load, estimate, num_more)
        self._tables.num_awaited += num_more
        if run.load is None:
            self._decide(request)
        return reading

    def _wait(
        self, request: EngineRequest, resume: Callable[[EngineRequest], None], reading: Reading
    ) -> None:
        reading.requests[request] = resume
        self._waiting[request] = reading

    def _estimate(self, run: PrefixRun) -> ReadEstimate:
        """Each tier reads for others first."""
        now, read = self._clock(), 0.0
        compute = self._compute_seconds(len(run.keys))
        for number, num_blocks in Counter(run.tiers).items():
            tier = self.tiers.tiers[number]
            rate = tier.load_rate.at(now)
            if rate is None or not compute:
                return ReadEstimate(compute=compute)
            read += rate * (num_blocks + tier.reads.num)
        return ReadEstimate(read, compute)

    def _compute_seconds(self, num_blocks: int) -> float:
        """0 = not measured recently."""
        return (self._token_rate.at(self._clock()) or 0.0) * self._block_size * num_blocks

    def _report(self, reading: Reading) -> None:
        load, estimate = reading.load, reading.estimate
        num_tokens = len(load.arrived) * self._block_size
        is_slow = 0.0 < estimate.compute < load.seconds
        self.counts["lost" if not num_tokens else "slow" if is_slow else "read"] += 1
        choice: Literal["read", "lost"] = "read" if num_tokens else "lost"
        first = next(iter(reading.requests))
        self._note(first, estimate, choice=choice, num_tokens=num_tokens, load=load)

    def _note(
        self,
        request: EngineRequest,
        estimate: ReadEstimate,
        *,
        choice: Literal["read", "lost", "compute"],
        num_tokens: int = 0,
        load: Load | None = None,
    ) -> None:
        request.tier_read = TierRead(
            choice=choice,
            tiers="" if load is None else ",".join(load.tiers),
            num_tokens=num_tokens,
            seconds=0.0 if load is None else load.seconds,
            expected_seconds=estimate.read,
            compute_seconds=estimate.compute,
        )
