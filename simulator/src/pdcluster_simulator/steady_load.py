"""Intervals of a steady load, repeated instead of simulated: a day of load in a minute.

Where the load and the workers were the same for a while and nothing grows, the intervals to come
are those before again, with their scrapes, until the load changes or the autoscaler changes a size.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import fmean

from pdcluster_simulator.autoscaling import Scrapes, SimulatedAutoscaler
from pdcluster_simulator.results import ClusterSample, Mark, Recorder

NUM_REPEATED = 4
"""Intervals that are repeated, by turns, after as many like them."""
_SHARE = 0.1  # of a use, or of a queue, that is no growth
_QUEUED = 4.0  # requests that are none, too


@dataclass(frozen=True, slots=True)
class _Interval:
    """One of the simulation: what it recorded, and what was scraped at its end."""

    begin: Mark
    end: Mark
    sample: ClusterSample
    scrapes: Scrapes


class SteadyLoad:
    """changes: times at which the trace has another load, or ends."""

    def __init__(
        self,
        recorder: Recorder,
        autoscaler: SimulatedAutoscaler,
        changes: Sequence[float],
        seconds: float,
    ) -> None:
        self._recorder, self._autoscaler = recorder, autoscaler
        self._changes, self._seconds = [*changes], seconds
        self._intervals: deque[_Interval] = deque(maxlen=2 * NUM_REPEATED)
        self._mark = recorder.mark()

    def repeat(self, time: float, scrapes: Scrapes) -> float:
        """After the interval that ends at `time`: returns by how many seconds time goes on."""
        recorder, begin = self._recorder, self._mark
        self._mark = end = recorder.mark()
        self._intervals.append(_Interval(begin, end, recorder.samples[-1], scrapes))
        while self._changes and self._changes[0] <= time - self._seconds:
            del self._changes[0]
        if not self._changes or self._changes[0] < time or not self._autoscaler.is_settled:
            self._intervals.clear()
            return 0.0
        if not _is_steady([each.sample for each in self._intervals]):
            return 0.0
        return self._repeated(time, self._changes[0])

    def _repeated(self, time: float, until: float) -> float:
        recorder, seconds = self._recorder, self._seconds
        passed, last = 0.0, [*self._intervals][NUM_REPEATED:]
        for number, each in enumerate(cycle(last)):
            if time + passed + seconds > until or not self._autoscaler.is_settled:
                break
            passed += seconds
            later = NUM_REPEATED * seconds * (1 + number // NUM_REPEATED)
            recorder.repeat(each.begin, each.end, later)
            sample = replace(each.sample, seconds=time + passed - seconds)
            recorder.samples.append(sample)
            self._autoscaler.decide(time + passed, each.scrapes)
        recorder.repeated += passed
        self._intervals.clear()
        self._mark = recorder.mark()
        return passed


def _is_steady(samples: Sequence[ClusterSample]) -> bool:
    if len(samples) < 2 * NUM_REPEATED:
        return False
    before = _means(samples[-2 * NUM_REPEATED : -NUM_REPEATED])
    now = _means(samples[-NUM_REPEATED:])
    return all(
        abs(now[name] - old) <= (_QUEUED + _SHARE * old if name[0] == "queued" else _SHARE)
        for name, old in before.items()
    )


def _means(samples: Sequence[ClusterSample]) -> dict[tuple[str, str], float]:
    """By name and role."""
    return {
        (name, role): fmean(getattr(sample, name).get(role, 0.0) for sample in samples)
        for name in ("queued", "kv_usage", "busy")
        for role in samples[0].queued
    }
