"""The search for engine sizes under latency limits: a hill climb, without running anything.

It starts from the sizes of the file, tries the other schedulers, then neighbours (budget or
sequences doubled or halved) that hold a higher request rate within the limits, until none does
or the trials are used up.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from pdcluster_schema.ports import SchedulerName

GAIN = 1.1
"""A neighbour has to hold so much more: loads are short, and their noise is not to be climbed."""
STEP = 1.5
LEAST_RATE = 0.05
MAX_RISES = 6
"""Most trials of one candidate, so that loose limits leave trials for its neighbours."""

MIN_BATCHED_TOKENS, MAX_BATCHED_TOKENS = 16, 8192
MIN_SEQUENCES, MAX_SEQUENCES = 1, 512

SCHEDULERS: tuple[SchedulerName, ...] = ("continuous", "sarathi", "simple-chunking")
"""Those that work with every budget; the others need one of the context's length."""


@dataclass(frozen=True, slots=True)
class Sizes:
    max_batched_tokens: int
    max_sequences: int
    scheduler: SchedulerName = "continuous"

    @property
    def is_valid(self) -> bool:
        """Within bounds, with a token a step for each sequence."""
        return (
            MIN_BATCHED_TOKENS <= self.max_batched_tokens <= MAX_BATCHED_TOKENS
            and MIN_SEQUENCES <= self.max_sequences <= MAX_SEQUENCES
            and self.max_sequences <= self.max_batched_tokens
        )

    def other_schedulers(self) -> list["Sizes"]:
        return [replace(self, scheduler=name) for name in SCHEDULERS if name != self.scheduler]

    def neighbours(self) -> list["Sizes"]:
        """The larger budget first: it gains most often."""
        found = [
            replace(self, max_batched_tokens=self.max_batched_tokens * 2),
            replace(self, max_batched_tokens=self.max_batched_tokens // 2),
            replace(self, max_sequences=self.max_sequences * 2),
            replace(self, max_sequences=self.max_sequences // 2),
        ]
        return [sizes for sizes in found if sizes.is_valid]


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    ttft_p90_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, slots=True)
class Trial:
    sizes: Sizes
    rate: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    ttft_p90_ms: float
    itl_p99_ms: float
    num_failed: int = 0

    def meets(self, limits: LatencyTargets) -> bool:
        return self.num_failed == 0 and self.excess(limits) <= 1.0

    def excess(self, limits: LatencyTargets) -> float:
        """The worse of both latencies as a multiple of its limit."""
        return max(self.ttft_p90_ms / limits.ttft_p90_ms, self.itl_p99_ms / limits.itl_p99_ms)


@dataclass(frozen=True, slots=True)
class CompletedTrial:
    trial: Trial
    result: TrialResult


@dataclass(frozen=True, slots=True)
class SearchResult:
    best: CompletedTrial | None
    tried: Sequence[CompletedTrial]

    def closest(self, limits: LatencyTargets) -> CompletedTrial:
        return min(self.tried, key=lambda one: (one.result.num_failed, one.result.excess(limits)))


_LATENCIES = {"TTFT": "ttft_p90_ms", "ITL": "itl_p99_ms"}


def front(tried: Sequence[CompletedTrial]) -> dict[CompletedTrial, tuple[str, ...]]:
    """For each trial the latencies that no other one improves without a lower request rate."""
    whole = [one for one in tried if one.result.num_failed == 0]
    return {
        one: tuple(
            name
            for name, field in _LATENCIES.items()
            if one in whole and not any(_beats(other, one, field) for other in whole)
        )
        for one in tried
    }


def _beats(other: CompletedTrial, one: CompletedTrial, field: str) -> bool:
    found, best = [(-each.trial.rate, getattr(each.result, field)) for each in (one, other)]
    return found != best and all(b <= f for b, f in zip(best, found, strict=True))


Search = Generator[Trial, TrialResult, SearchResult]


def search(start: Sizes, rate: float, limits: LatencyTargets, max_trials: int) -> Search:
    """A generator: yields trials, is sent their results, returns the best.

    Trials of the same sizes follow each other, so that one cluster serves them.
    """
    climb = _HillClimb(limits, max_trials)
    yield from climb.find_rate(start, rate)
    if climb.best is None:
        return SearchResult(None, climb.tried)
    for other in start.other_schedulers():
        if not climb.is_spent:
            yield from climb.try_scheduler(
                replace(climb.best.trial.sizes, scheduler=other.scheduler)
            )
    visited = {climb.best.trial.sizes}
    while waiting := [s for s in climb.best.trial.sizes.neighbours() if s not in visited]:
        if climb.is_spent:
            break
        visited.add(waiting[0])
        yield from climb.try_neighbour(waiting[0])
    return SearchResult(climb.best, climb.tried)


class _HillClimb:
    def __init__(self, limits: LatencyTargets, max_trials: int) -> None:
        self.best: CompletedTrial | None = None
        self.tried: list[CompletedTrial] = []
        self._limits, self._max_trials = limits, max_trials

    @property
    def is_spent(self) -> bool:
        return len(self.tried) >= self._max_trials

    def find_rate(self, sizes: Sizes, rate: float) -> Generator[Trial, TrialResult, None]:
        """Lower the rate until it holds, then raise it."""
        while not (yield from self._holds(Trial(sizes, rate))):
            rate /= 2
            if self.is_spent or rate < LEAST_RATE:
                return
        if len(self.tried) == 1:  # else twice this rate is known to fail
            yield from self._rise(sizes)

    def try_neighbour(self, sizes: Sizes) -> Generator[Trial, TrialResult, None]:
        """Try sizes at a rate above the best; stop at once where it does not hold."""
        assert self.best is not None
        if (yield from self._holds(Trial(sizes, self.best.trial.rate * GAIN))):
            yield from self._rise(sizes)

    def try_scheduler(self, other: Sizes) -> Generator[Trial, TrialResult, None]:
        """Take another scheduler only where it holds a rate that the best so far does not.

        The best runs at that rate too: its own rate is up to a step below its limit.
        """
        assert self.best is not None
        while not self.is_spent:
            best = self.best
            rate = best.trial.rate * GAIN
            if not (yield from self._holds(Trial(other, rate))):
                return
            if self.is_spent or not (yield from self._holds(Trial(best.trial.sizes, rate))):
                yield from self._rise(other)
                return

    def _rise(self, sizes: Sizes) -> Generator[Trial, TrialResult, None]:
        assert self.best is not None
        for _ in range(MAX_RISES):
            if self.is_spent or not (
                yield from self._holds(Trial(sizes, self.best.trial.rate * STEP))
            ):
                return

    def _holds(self, trial: Trial) -> Generator[Trial, TrialResult, bool]:
        result = yield trial
        self.tried.append(CompletedTrial(trial, result))
        if not result.meets(self._limits):
            return False
        self.best = self.tried[-1]
        return True
