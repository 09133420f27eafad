"""The greatest rate that holds an SLO for gaps between tokens, by bisection.  Pure.

A rate holds where p99 of the gaps (TBT) is inside the SLO and the queue does not
grow: half of the later requests begin within two seconds.  Rates are steps of
a ladder, so that schedulers compare, and a search has a limit of probes and of time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from schedulers_load import Answers, TimedRequest

MOST_DELAY_SECONDS = 2.0
"""Between arrival and first step, of the median among later requests."""

STEPS_OF_AN_OCTAVE = 4
LOWEST_RATE, NUM_OCTAVES = 0.5, 4
LADDER = [
    round(LOWEST_RATE * 2 ** (step / STEPS_OF_AN_OCTAVE), 2)
    for step in range(NUM_OCTAVES * STEPS_OF_AN_OCTAVE + 1)
]
"""Requests a second: 0.5 to 8, each 19 % above the one before."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit for p99 of the gaps between tokens."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Figures of a load at one rate; is_whole: False where it was ended because it was lost."""

    rate: float
    tbt_seconds: float
    delay_seconds: float
    is_whole: bool = True

    def holds(self, slo: Slo) -> bool:
        """Return whether this rate is inside the SLO.  One that was ended early holds none."""
        is_steady = self.delay_seconds <= MOST_DELAY_SECONDS
        return self.is_whole and is_steady and self.tbt_seconds <= slo.seconds

    def cell(self) -> str:
        """For a table: rate (p99 in ms, delay in s)."""
        mark = "" if self.is_whole else ", ended"
        return f"{self.rate:g} ({1e3 * self.tbt_seconds:.0f}, {self.delay_seconds:.1f}{mark})"


def probe_of(rate: float, due: Sequence[TimedRequest], answers: Answers, now: float) -> Probe:
    """The figures of a load; of one that was ended, as far as it came."""
    tbt = answers.tbt(99) if answers.gaps else 0.0
    return Probe(rate, tbt, median(_later_delays(due, answers, now)), answers.is_complete(len(due)))


@dataclass(slots=True)
class LostWatch:
    """Ends a load that can hold no more; asked after each step, it looks when a request has ended.

    slo: the loosest that is searched for.  now: when it was asked last.
    """

    due: Sequence[TimedRequest]
    slo: Slo
    now: float = field(default=0.0, init=False)
    _num_ended: int = field(default=0, init=False)

    def __call__(self, answers: Answers, now: float) -> bool:
        """Return whether the rest cannot change that the SLO is missed or the queue grew."""
        self.now = now
        if answers.num_ended == self._num_ended:
            return False
        self._num_ended = answers.num_ended
        num_gaps = sum(each.spec.sampling.max_tokens - 1 for each in self.due)
        num_over = sum(gap > self.slo.seconds for gap in answers.gaps)
        delays = _later_delays(self.due, answers, now)
        num_late = sum(delay > MOST_DELAY_SECONDS for delay in delays)
        # One more than the share, since a percentile lies between two values.
        return num_over > 0.01 * num_gaps + 1 or num_late > len(delays) / 2 + 1


def _later_delays(due: Sequence[TimedRequest], answers: Answers, now: float) -> list[float]:
    """Delays of the second half of the requests: before it, a queue that grows is still short."""
    names = [each.spec.request_id for each in due[len(due) // 2 :]]
    return [answers.delays.get(name, max(0.0, now - answers.arrived[name])) for name in names]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one search: so many probes at most, and none after the deadline."""

    num_probes: int
    deadline: float
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate that held, 0 for none, and the lowest above it that did not.

    above: None where the highest of the ladder holds.  is_exact: nothing of the ladder is between.
    """

    rate: float
    above: float | None
    is_exact: bool

    def cell(self) -> str:
        """For a table.

        >>> Capacity(1.0, 1.12, is_exact=True).cell(), Capacity(1.0, 2.0, is_exact=False).cell()
        ('1', '1 to 2')
        >>> Capacity(0.0, 0.5, is_exact=True).cell(), Capacity(8.0, None, is_exact=True).cell()
        ('under 0.5', '8 or more')
        """
        if self.above is None:
            return f"{self.rate:g} or more"
        if not self.rate:
            return f"under {self.above:g}"
        return f"{self.rate:g}" if self.is_exact else f"{self.rate:g} to {self.above:g}"


def search(
    slo: Slo,
    probe: Callable[[float], Probe],
    seen: dict[float, Probe],
    bounds: Bounds,
) -> Capacity:
    """Look for the capacity among the rates of the ladder.

    seen: probes by rate, of this search and of one for a looser SLO
    """
    low = max(
        (index for index, rate in enumerate(LADDER) if rate in seen and seen[rate].holds(slo)),
        default=-1,
    )
    high = min(
        (index for index in range(low + 1, len(LADDER)) if LADDER[index] in seen),
        default=len(LADDER),
    )
    num_left = bounds.num_probes
    while high - low > 1 and num_left and bounds.clock() < bounds.deadline:
        middle = (low + high) // 2
        rate = LADDER[middle]
        seen[rate] = probe(rate)
        num_left -= 1
        if seen[rate].holds(slo):
            low = middle
        else:
            high = middle
    above = LADDER[high] if high < len(LADDER) else None
    return Capacity(LADDER[low] if low >= 0 else 0.0, above, is_exact=high - low <= 1)
