"""Reports of an engine: statistics when something has changed, and changes of its prefix cache.

Gauges are read from those that own the state, at the moment of a report.
When the engine takes a turn, and whether it is idle, is `engine.core`'s to say.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.executor import Executor
from pdcluster_worker.engine.grammar_queue import GrammarQueue
from pdcluster_worker.engine.ports import Grammars
from pdcluster_worker.engine.prefill_delayer import PrefillDelayer
from pdcluster_worker.engine.receiving import Receiver
from pdcluster_worker.engine.scheduler.protocol import Scheduler
from pdcluster_worker.engine.sending import Sender
from pdcluster_worker.engine.stats import Counters, Gauges, with_constraints, with_delays
from pdcluster_worker.messages.engine import EngineOutput

STATS_INTERVAL_SECONDS = 0.1
"""While the engine works, statistics go out at most this often."""


@dataclass(frozen=True, slots=True)
class GaugeSources:
    """Owners of the state behind the gauges; delayer: None where no prefill is delayed."""

    scheduler: Scheduler
    receiver: Receiver
    sender: Sender
    pool: BlockPool
    executor: Executor
    delayer: PrefillDelayer | None
    compiling: GrammarQueue
    grammars: Grammars


class Reporter:
    """One per engine.

    counters:   what it has done.
    num_inputs: messages taken since the start.
    changed:    something has happened since the last statistics; a new engine has yet to say what
                it has.
    """

    def __init__(self, parts: GaugeSources, clock: Callable[[], float]) -> None:
        self.counters = Counters()
        self.num_inputs = 0
        self.changed = True
        self._parts = parts
        self._clock = clock
        self._reported_seconds = clock()
        self._num_overdue = 0

    def report(self, *, idle: bool) -> list[EngineOutput]:
        """Messages that are due now.  idle: no step is due, so statistics are not held back."""
        events = self._parts.pool.prefix_cache.take_events()
        outputs: list[EngineOutput] = [] if events is None else [events]
        now = self._clock()
        num_overdue = self._parts.receiver.num_overdue(now)
        if not self.changed and num_overdue == self._num_overdue:
            return outputs
        if not idle and now - self._reported_seconds < STATS_INTERVAL_SECONDS:
            return outputs
        self._num_overdue = num_overdue
        self.changed = False
        self._reported_seconds = now
        report, delayer = self.counters.report(self._gauges(num_overdue)), self._parts.delayer
        report = with_constraints(report, self._parts.grammars.take_counts())
        return [*outputs, report if delayer is None else with_delays(report, delayer.take_counts())]

    def _gauges(self, num_overdue: int) -> Gauges:
        scheduler, receiver, sender, pool = (
            self._parts.scheduler,
            self._parts.receiver,
            self._parts.sender,
            self._parts.pool,
        )
        return Gauges(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.ready) + len(self._parts.compiling),
            waiting_tokens=scheduler.num_waiting_tokens,
            num_receiving=receiver.num_receiving,
            blocks=pool.counts(),
            free_blocks=pool.num_available,
            fences_overdue=num_overdue,
            preemptions=scheduler.num_preemptions,
            bytes_sent=sender.num_bytes,
            bytes_received=receiver.num_bytes,
            num_transfers=sender.num_transfers + receiver.num_transfers,
            num_inputs=self.num_inputs,
            failed_rows=dict(self._parts.executor.num_failed),
            evictions=pool.num_evictions,
        )
