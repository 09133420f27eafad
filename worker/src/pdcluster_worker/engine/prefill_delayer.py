"""Holds new prompts back for some passes, so that they are prefilled together."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pdcluster_worker.engine.request import Status as RequestStatus
from pdcluster_worker.engine.scheduler.base import Schedule, Scheduler
from pdcluster_worker.messages.engine_settings import DelayerSettings

Status = Literal["none", "mixed", "all"]
"""Number of engines that could prefill now."""

Reason = Literal["", "delay", "token_watermark", "wait_timeout", "wait_success", "no_wait"]

REMEMBERED_BATCHES = 16
"""Prefill batches whose largest is what a batch of prompts is expected to be."""

PAUSE_SECONDS = 0.02
"""Pause of a delayed engine with nothing to run, until its next pass; about a short step."""


@dataclass(frozen=True, slots=True)
class RankState:
    """State of one engine in one scheduling pass."""

    prefillable: bool  # it could compute a prompt now
    below_watermark: bool = False  # and its KV usage is below the watermark
    running: int = 0
    max_prefill: int = 0  # prompts in its largest recent prefill batch
    waiting: int = 0
    timed_out: bool = False  # it has waited for the longest time


@dataclass(frozen=True, slots=True)
class DelayWait:
    """Passes for which prompts have been held back, and since when."""

    passes: int
    since: float


@dataclass(frozen=True, slots=True)
class DelayDecision:
    """The outcome of a pass.  has_no_slots: delayed because a whole batch finds none."""

    status: Status
    allow: bool
    reason: Reason
    has_no_slots: bool = False


@dataclass(frozen=True, slots=True)
class Pressure:
    """The engine before a pass."""

    num_waiting: int
    num_running: int
    max_running: int
    is_continuing: bool
    usage: float

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Pressure":
        pool = scheduler.tables.pool
        return cls(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running) + len(scheduler.ready),
            max_running=scheduler.settings.max_sequences,
            is_continuing=scheduler.is_prefilling,
            usage=1 - pool.num_available / pool.num_blocks,
        )

    @property
    def prefillable(self) -> bool:
        """True if a prompt could be computed: one that has begun, or one that has a slot."""
        return self.is_continuing or (self.num_waiting > 0 and self.num_running < self.max_running)


class Board(Protocol):
    """Board on which the engines of one worker share their states; nothing here waits."""

    def publish(self, state: RankState) -> None:
        """Say what is so now."""

    def withdraw(self) -> None:
        """Say nothing any more: an engine without requests has no part in it."""

    def others(self) -> list[RankState]:
        """Last states of the other engines, unless they are old."""


class OwnBoard:
    """The board of a lone engine, which has no others."""

    def publish(self, state: RankState) -> None: ...

    def withdraw(self) -> None: ...

    def others(self) -> list[RankState]:
        return []


def negotiate(
    settings: DelayerSettings,
    wait: DelayWait | None,
    ranks: Sequence[RankState],
    max_running: int,
    now: float,
) -> DelayDecision:
    """The decision of one pass over the states of all engines, this one among them."""
    can = [rank.prefillable for rank in ranks]
    if not any(can):
        return DelayDecision("none", True, "")
    status: Status = "all" if all(can) else "mixed"
    if any(rank.below_watermark for rank in ranks):
        return DelayDecision(status, True, "token_watermark")
    running, batch = max(rank.running for rank in ranks), max(rank.max_prefill for rank in ranks)
    has_no_slots = status == "all" and max_running - running < batch
    least = 0  # prompts that must wait
    if settings.queue_min_ratio is not None:
        least = min(int(running * settings.queue_min_ratio), batch)
    is_short = max(rank.waiting for rank in ranks) < least
    if not (status == "mixed" or has_no_slots or is_short):
        return DelayDecision(status, True, "no_wait" if wait is None else "wait_success")
    num_passes, since = (0, now) if wait is None else (wait.passes, wait.since)
    is_over = (
        num_passes >= settings.max_delay_passes - 1 or now - since >= settings.max_delay_seconds
    )
    if is_over or any(rank.timed_out for rank in ranks):
        return DelayDecision(status, True, "wait_timeout")
    return DelayDecision(status, False, "delay", has_no_slots)


@dataclass(slots=True)
class DelayerCounts:
    """Counts since they were last taken."""

    # (status, allowed, reason, executed) of passes.
    outcomes: Counter[tuple[Status, bool, Reason, bool]] = field(default_factory=Counter)
    # (passes, seconds) before prompts that were let in and computed.
    waits: list[tuple[int, float]] = field(default_factory=list)


class PrefillDelayer:
    """The delayer of one engine: `begin` before each schedule and `finish` after it, once each."""

    def __init__(self, settings: DelayerSettings, board: Board) -> None:
        self._settings = settings
        self._board = board
        self._wait: DelayWait | None = None
        self._before: DelayWait | None = None  # of the passes before the present one
        self._verdict = DelayDecision("none", True, "")
        self._batches: deque[int] = deque(maxlen=REMEMBERED_BATCHES)
        self._skips_slots = True  # once: nothing is known of batches at the start
        self._counts = DelayerCounts()

    def schedule(self, scheduler: Scheduler, now: float) -> Schedule:
        """Plan a step; waiting requests are held back, but none that has begun before."""
        allows = self.begin(Pressure.of(scheduler), now)
        has_begun = (
            bool(scheduler.waiting) and scheduler.waiting[0].status is RequestStatus.PREEMPTED
        )
        return scheduler.schedule(admit=allows or has_begun)

    def begin(self, pressure: Pressure, now: float) -> bool:
        """Negotiate a pass; whether new prompts may be let in."""
        state = self._state(pressure, now)
        self._board.publish(state)
        self._before = self._wait
        verdict = negotiate(
            self._settings, self._before, [state, *self._board.others()], pressure.max_running, now
        )
        if verdict.has_no_slots and self._skips_slots:
            self._skips_slots = False
            verdict = replace(verdict, allow=True, reason="no_wait", has_no_slots=False)
        if verdict.allow:
            self._wait = None
        elif self._wait is None:
            self._wait = DelayWait(1, now)
        else:
            self._wait = replace(self._wait, passes=self._wait.passes + 1)
        self._verdict = verdict
        return verdict.allow

    def finish(self, num_admitted: int, is_idle: bool, now: float) -> None:
        """Count the outcome of the pass."""
        verdict, before = self._verdict, self._before
        if num_admitted:
            self._batches.append(num_admitted)
        if verdict.status != "none":
            self._counts.outcomes[
                verdict.status, verdict.allow, verdict.reason, num_admitted > 0
            ] += 1
        if verdict.allow and num_admitted:
            # The wait of the passes before: an allowed pass itself has none any more.
            self._counts.waits.append(
                (0, 0.0) if before is None else (before.passes, now - before.since)
            )
        if is_idle:
            self._wait = None
            self._board.withdraw()

    def next_pass_seconds(self, now: float) -> float | None:
        """In how many seconds a delayed idle engine tries again; None = no delay."""
        if self._wait is None:
            return None
        return min(
            PAUSE_SECONDS, max(0.0, self._wait.since + self._settings.max_delay_seconds - now)
        )

    def take_counts(self) -> DelayerCounts:
        counts, self._counts = self._counts, DelayerCounts()
        return counts

    def _state(self, pressure: Pressure, now: float) -> RankState:
        watermark, prefillable = self._settings.token_usage_low_watermark, pressure.prefillable
        return RankState(
            prefillable=prefillable,
            below_watermark=prefillable and watermark is not None and pressure.usage < watermark,
            running=pressure.num_running,
            max_prefill=max(self._batches, default=0),
            waiting=pressure.num_waiting,
            timed_out=self._wait is not None
            and now - self._wait.since >= self._settings.max_delay_seconds,
        )
