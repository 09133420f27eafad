"""The search for engine sizes under latency limits: which trial comes next, and what was found.
Pure.

It climbs: from the sizes that the file has, to another scheduler and then to a
neighbour (budget or sequences doubled or halved) that holds a higher request
rate inside the limits, until no neighbour does or the trials are used up.  A
neighbour is asked first whether it holds a bit more than the best so far; where
it does not, one trial was enough.  Another scheduler has to hold what the one
of the file does not.  It does not know how a trial is run.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from pdcluster_api.schema.scheduling import SchedulerName

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
    """Values that are tuned."""

    max_batched_tokens: int
    max_sequences: int
    scheduler: SchedulerName = "continuous"

    @property
    def is_valid(self) -> bool:
        """Inside the bounds of the search, and a step has a token for each sequence."""
        return (
            MIN_BATCHED_TOKENS <= self.max_batched_tokens <= MAX_BATCHED_TOKENS
            and MIN_SEQUENCES <= self.max_sequences <= MAX_SEQUENCES
            and self.max_sequences <= self.max_batched_tokens
        )

    def rivals(self) -> list["Sizes"]:
        """The same with the other schedulers."""
        return [replace(self, scheduler=name) for name in SCHEDULERS if name != self.scheduler]

    def neighbours(self) -> list["Sizes"]:
        """Those that a doubling or halving of one value gives; the larger budget first, it
        gains most often.
        """
        found = [
            replace(self, max_batched_tokens=self.max_batched_tokens * 2),
            replace(self, max_batched_tokens=self.max_batched_tokens // 2),
            replace(self, max_sequences=self.max_sequences * 2),
            replace(self, max_sequences=self.max_sequences // 2),
        ]
        return [sizes for sizes in found if sizes.is_valid]


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """In milliseconds."""

    ttft_p90_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A load to run: Poisson arrivals, `rate` a second."""

    sizes: Sizes
    rate: float


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial.  num_failed: answers that were not complete"""

    ttft_p90_ms: float
    itl_p99_ms: float
    num_failed: int = 0

    def meets(self, limits: LatencyTargets) -> bool:
        """Every answer was complete, and both latencies are inside."""
        return self.num_failed == 0 and self.excess(limits) <= 1.0

    def excess(self, limits: LatencyTargets) -> float:
        """The worse of both latencies as a multiple of its limit."""
        return max(self.ttft_p90_ms / limits.ttft_p90_ms, self.itl_p99_ms / limits.itl_p99_ms)


@dataclass(frozen=True, slots=True)
class CompletedTrial:
    """A trial and what it showed."""

    trial: Trial
    result: TrialResult


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The end of a search.  best: None = no trial met the limits"""

    best: CompletedTrial | None
    tried: Sequence[CompletedTrial]

    def closest(self, limits: LatencyTargets) -> CompletedTrial:
        """The trial that missed the limits least."""
        return min(self.tried, key=lambda one: (one.result.num_failed, one.result.excess(limits)))


Search = Generator[Trial, TrialResult, SearchResult]


def search(start: Sizes, rate: float, limits: LatencyTargets, max_trials: int) -> Search:
    """Yield trials, be sent what each showed, return what was found.

    rate: of the first trial, a second; a trial more often of the same sizes comes right after the
          one before
    """
    climb = _Climb(limits, max_trials)
    yield from climb.settle(start, rate)
    if climb.best is None:
        return SearchResult(None, climb.tried)
    for rival in start.rivals():
        if not climb.is_spent:
            yield from climb.compete(replace(climb.best.trial.sizes, scheduler=rival.scheduler))
    visited = {climb.best.trial.sizes}
    while waiting := [s for s in climb.best.trial.sizes.neighbours() if s not in visited]:
        if climb.is_spent:
            break
        visited.add(waiting[0])
        yield from climb.challenge(waiting[0])
    return SearchResult(climb.best, climb.tried)


class _Climb:
    """The best so far, and every trial."""

    def __init__(self, limits: LatencyTargets, max_trials: int) -> None:
        self.best: CompletedTrial | None = None
        self.tried: list[CompletedTrial] = []
        self._limits, self._max_trials = limits, max_trials

    @property
    def is_spent(self) -> bool:
        """No further trial may run."""
        return len(self.tried) >= self._max_trials

    def settle(self, sizes: Sizes, rate: float) -> Generator[Trial, TrialResult, None]:
        """The first sizes: down until a rate holds, then up from there."""
        while not (yield from self._holds(Trial(sizes, rate))):
            rate /= 2
            if self.is_spent or rate < LEAST_RATE:
                return
        if len(self.tried) == 1:  # else twice this rate is known to fail
            yield from self._rise(sizes)

    def challenge(self, sizes: Sizes) -> Generator[Trial, TrialResult, None]:
        """Other sizes: only what holds more than the best is looked into."""
        assert self.best is not None
        if (yield from self._holds(Trial(sizes, self.best.trial.rate * GAIN))):
            yield from self._rise(sizes)

    def compete(self, rival: Sizes) -> Generator[Trial, TrialResult, None]:
        """Another scheduler: it is taken where it holds a rate that the best does not.

        The best has to hold what the rival holds, since its own rate is a step away from its limit.
        """
        assert self.best is not None
        while not self.is_spent:
            best = self.best
            rate = best.trial.rate * GAIN
            if not (yield from self._holds(Trial(rival, rate))):
                return
            if self.is_spent or not (yield from self._holds(Trial(best.trial.sizes, rate))):
                yield from self._rise(rival)
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
