"""Records of a load and figures of them, in seconds of the load generator's monotonic clock.

Failed answers count as requests and are left out of latencies.

    TTFT   scheduled arrival to first chunk
    TPOT   per request, (e2e - TTFT) / (output tokens - 1); undefined for one token
    ITL    every gap between two chunks of an answer, over all answers
    e2e    scheduled arrival to last chunk
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None

    def is_met_by(self, result: "RequestResult") -> bool:
        if result.failure is not None:
            return False
        pairs = (
            (result.ttft_seconds, self.ttft_seconds),
            (result.tpot_seconds or 0.0, self.tpot_seconds),
            (result.e2e_seconds, self.e2e_seconds),
        )
        return all(limit is None or seconds <= limit for seconds, limit in pairs)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as its client saw it.

    scheduled_seconds: when it should have been sent; started_seconds: when it was.
    chunk_seconds:     arrival of each chunk with output.
    num_tokens:        output tokens by the server's count.
    num_prompt_tokens: by the server's count, else as sent; 0 where unknown.
    """

    scheduled_seconds: float
    started_seconds: float
    chunk_seconds: tuple[float, ...]
    num_tokens: int
    failure: str | None = None
    num_prompt_tokens: int = 0

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_seconds[0] - self.scheduled_seconds

    @property
    def tpot_seconds(self) -> float | None:
        if self.num_tokens < 2:
            return None
        return (self.chunk_seconds[-1] - self.chunk_seconds[0]) / (self.num_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        return self.chunk_seconds[-1] - self.scheduled_seconds

    @property
    def gaps_seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunk_seconds)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """client_cpu_seconds: processor time of the load generator during the load."""

    results: tuple[RequestResult, ...]
    duration_seconds: float
    client_cpu_seconds: float

    @property
    def complete(self) -> list[RequestResult]:
        return [result for result in self.results if result.failure is None]

    @property
    def failures(self) -> list[str]:
        return [result.failure for result in self.results if result.failure is not None]

    @property
    def latencies_seconds(self) -> dict[str, list[float]]:
        """By name (ttft, tpot, itl, e2el), of the complete answers."""
        complete = self.complete
        return {
            "ttft": [result.ttft_seconds for result in complete],
            "tpot": [result.tpot_seconds for result in complete if result.tpot_seconds is not None],
            "itl": [gap for result in complete for gap in result.gaps_seconds],
            "e2el": [result.e2e_seconds for result in complete],
        }

    def num_good(self, slo: LatencyLimits) -> int:
        return sum(slo.is_met_by(result) for result in self.results)


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
