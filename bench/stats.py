"""What the bench measures and how it counts, as pure functions over recorded times.

Times are seconds of one monotonic clock, the load generator's.  A failed answer
stays in every count that speaks of requests and is left out of the latencies
only; nothing is dropped.  It does not know systems, workloads or HTTP.

    TTFT   scheduled arrival to first chunk
    TPOT   per request, (e2e - TTFT) / (output tokens - 1); undefined for one token
    ITL    every gap between two chunks of an answer, over all answers
    e2e    scheduled arrival to last chunk
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

TTFT_SLO_SECONDS = 2.0
TPOT_SLO_SECONDS = 0.1

LATENCIES = ("TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms", "ITL p50 ms", "ITL p99 ms")
RATES = ("output tokens/s", "requests/s", "goodput good/s", "good share of sent")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it.

    scheduled_seconds: when it should have been sent; started_seconds: when it was.
    chunk_seconds:     arrival of each chunk that showed output.
    num_tokens:        output tokens, as the system itself counts them.
    failure:           None for a complete answer, else why it is not one.
    """

    scheduled_seconds: float
    started_seconds: float
    chunk_seconds: tuple[float, ...]
    num_tokens: int
    failure: str | None = None

    @property
    def ttft_seconds(self) -> float:
        """Scheduled arrival to first chunk; the answer has one."""
        return self.chunk_seconds[0] - self.scheduled_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """(e2e - TTFT) / (output tokens - 1), None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_seconds[-1] - self.chunk_seconds[0]) / (self.num_tokens - 1)

    @property
    def gaps_seconds(self) -> list[float]:
        """The gaps between its chunks."""
        return [after - before for before, after in pairwise(self.chunk_seconds)]

    @property
    def is_good(self) -> bool:
        """Complete and inside both SLOs; a single token has only the first to meet."""
        if self.failure is not None:
            return False
        return self.ttft_seconds <= TTFT_SLO_SECONDS and (self.tpot_seconds or 0.0) <= TPOT_SLO_SECONDS


@dataclass(frozen=True, slots=True)
class Run:
    """Every request of one workload on one system.

    duration_seconds:   first scheduled arrival to the end of the last answer.
    client_cpu_seconds: processor time of the load generator in it.
    """

    answers: tuple[Answer, ...]
    duration_seconds: float
    client_cpu_seconds: float

    @property
    def complete(self) -> list[Answer]:
        """The answers without a failure."""
        return [answer for answer in self.answers if answer.failure is None]

    @property
    def failures(self) -> list[str]:
        """Why each of the other answers failed."""
        return [answer.failure for answer in self.answers if answer.failure is not None]


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What one engine has counted since its start; times in seconds."""

    num_steps: float
    step_seconds: float
    overhead_seconds: float
    num_remote_prefills: float

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """What was counted after `before`."""
        return EngineCounters(
            self.num_steps - before.num_steps,
            self.step_seconds - before.step_seconds,
            self.overhead_seconds - before.overhead_seconds,
            self.num_remote_prefills - before.num_remote_prefills,
        )

    @property
    def overhead_ms_per_step(self) -> float:
        """Time of a mean step outside the model; 0 when no step ran."""
        return 1e3 * self.overhead_seconds / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over the rounds."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between closest ranks (numpy's default).

    >>> percentile([1.0, 2.0, 3.0, 5.0], 50)
    2.5
    >>> percentile([1.0, 2.0], 99)
    1.99

    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("values: a percentile needs at least one")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of one figure's values, a round each."""
    return Spread(median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs round by round, so that a noise that hits a whole round cancels; rounds with a zero below are left out."""
    return [a / b for a, b in zip(ours, theirs, strict=True) if b]


def summarize(run: Run) -> dict[str, float]:
    """LATENCIES that are defined (a run may have no complete answer) and all RATES."""
    return _latencies(run.complete) | _rates(run)


def start_delays(run: Run) -> list[float]:
    """How late each request was sent, in seconds: the health of an open loop's generator."""
    return [answer.started_seconds - answer.scheduled_seconds for answer in run.answers]


def chunks_per_token(run: Run) -> float:
    """1 when every token came in a chunk of its own; less when some showed no text of their own."""
    num_tokens = sum(answer.num_tokens for answer in run.complete)
    return sum(len(answer.chunk_seconds) for answer in run.complete) / num_tokens if num_tokens else 0.0


def _latencies(complete: list[Answer]) -> dict[str, float]:
    series = {
        "TTFT": [answer.ttft_seconds for answer in complete],
        "TPOT": [answer.tpot_seconds for answer in complete if answer.tpot_seconds is not None],
        "ITL": [gap for answer in complete for gap in answer.gaps_seconds],
    }
    return {f"{name} p{p} ms": 1e3 * percentile(values, p) for name, values in series.items() if values for p in (50, 99)}


def _rates(run: Run) -> dict[str, float]:
    num_good = sum(answer.is_good for answer in run.answers)
    counts = (sum(answer.num_tokens for answer in run.complete), len(run.complete), num_good)
    return dict(zip(RATES, [*(count / run.duration_seconds for count in counts), num_good / len(run.answers)], strict=True))
