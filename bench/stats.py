"""Counts of the bench over rounds and systems: pure functions over recorded answers and counters.

The formulas of a single answer are `pdctl.bench.load`', which
`pdctl bench` uses too.  It does not know systems, workloads or HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pdctl.bench.load import LatencyLimits, LoadResult, percentile

SLO = LatencyLimits(ttft_seconds=2.0, tpot_seconds=0.1)

LATENCIES = (
    *("TTFT mean ms", "TTFT p50 ms", "TTFT p99 ms"),
    *("TPOT p50 ms", "TPOT p99 ms"),
    *("ITL p50 ms", "ITL p99 ms"),
)
STREAM_RATE = "tokens/s of a stream"
RATES = ("output tokens/s", "requests/s", STREAM_RATE, "goodput good/s", "good share of sent")


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters of one engine since its start; times in seconds."""

    num_steps: float
    step_seconds: float
    overhead_seconds: float
    num_remote_prefills: float

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """Counts after `before`."""
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


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of one figure's values, a round each."""
    return Spread(median(values), min(values), max(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs round by round, so that a noise that hits a whole round cancels; rounds with a
    zero below are left out.
    """
    return [a / b for a, b in zip(ours, theirs, strict=True) if b]


def summarize(run: LoadResult) -> dict[str, float]:
    """LATENCIES that are defined (a run may have no complete answer) and all RATES."""
    return _latencies(run) | _rates(run)


def start_delays(run: LoadResult) -> list[float]:
    """Delay of each request behind its schedule, in seconds: the health of an open loop's
    generator.
    """
    return [answer.started_seconds - answer.scheduled_seconds for answer in run.results]


def chunks_per_token(run: LoadResult) -> float:
    """1 when every token came in a chunk of its own; less when some showed no text of their own."""
    num_tokens = sum(answer.num_tokens for answer in run.complete)
    return (
        sum(len(answer.chunk_seconds) for answer in run.complete) / num_tokens
        if num_tokens
        else 0.0
    )


def _latencies(run: LoadResult) -> dict[str, float]:
    series = {name.upper(): values for name, values in run.latencies_seconds.items() if values}
    found = {f"{name} mean ms": 1e3 * fmean(values) for name, values in series.items()}
    found |= {
        f"{name} p{p} ms": 1e3 * percentile(values, p)
        for name, values in series.items()
        for p in (50, 99)
    }
    return {name: found[name] for name in LATENCIES if name in found}


def _rates(run: LoadResult) -> dict[str, float]:
    num_good = run.num_good(SLO)
    seconds_a_token = run.latencies_seconds["tpot"]
    found = {
        "output tokens/s": sum(answer.num_tokens for answer in run.complete) / run.duration_seconds,
        "requests/s": len(run.complete) / run.duration_seconds,
        STREAM_RATE: 1 / median(seconds_a_token)
        if seconds_a_token and median(seconds_a_token)
        else 0.0,
        "goodput good/s": num_good / run.duration_seconds,
        "good share of sent": num_good / len(run.results),
    }
    return {name: found[name] for name in RATES}
