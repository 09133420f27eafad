"""Liveness of the process, for its probe. Pure. A process whose requests are refused is healthy;
one whose loop, queue or watches have stalled is not, and a restart is the cure.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdcluster_api.apiserver.kinds import Key
from pdcluster_operator.queue.work_queue import WorkQueue

# Longest time in which no reconcile begins or ends though keys wait; the length of the queue says
# nothing, since thousands take their time
MAX_WAIT_SECONDS = 120.0

MAX_WORK_SECONDS = 300.0  # Every request has a time limit, so work on one key ends long before

# Resyncs in a row that found changes which a watch had missed, before it counts as stalled
MAX_MISSES = 2


@dataclass
class QueueHealth:
    """Facts about the resync and the watches."""

    resync_seconds: float  # the interval that was set
    resynced: float  # when the last resync ended, on the clock of `problems`
    _missed: Counter[str] = field(default_factory=Counter)

    def resync_ended(self, now: float, kinds: Iterable[str], missed: Iterable[str]) -> None:
        """kinds: those that were listed; missed: those of them whose watch had missed a change."""
        self.resynced = now
        missed = set(missed)
        for kind in kinds:
            self._missed[kind] = self._missed[kind] + 1 if kind in missed else 0

    def problems(self, queue: WorkQueue[Key], now: float) -> list[str]:
        """Parts that have stalled, as text; empty = none."""
        found = [
            f"the watch of {kind} is silent"
            for kind, count in self._missed.items()
            if count >= MAX_MISSES
        ]
        if now - self.resynced > 3 * self.resync_seconds + MAX_WORK_SECONDS:
            found.append(f"no resync ended for {now - self.resynced:.0f} s")
        if queue.stood_still(now) > MAX_WAIT_SECONDS:
            found.append(
                f"PDClusters wait and no reconcile has begun or ended for "
                f"{queue.stood_still(now):.0f} s"
            )
        found += [
            f"the work on {key} takes {seconds:.0f} s"
            for key, seconds in queue.in_work(now)
            if seconds > MAX_WORK_SECONDS
        ]
        return found
