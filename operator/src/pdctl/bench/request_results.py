"""Records of a load generator, and figures of them: pure functions over times.

Times are seconds of one monotonic clock, the load generator's.  A failed answer
stays in every count that speaks of requests and is left out of the latencies
only; nothing is dropped.  It does not know servers, loads or HTTP.

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
    """Limits of a good answer, in seconds; None = no limit."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None

    def is_met_by(self, result: "RequestResult") -> bool:
        """Complete and inside every limit; a single token has no TPOT to meet."""
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
    chunk_seconds:     arrival of each chunk that showed output.
    num_tokens:        output tokens, as the server itself counts them.
    failure:           None for a complete answer, else why it is not one.
    num_prompt_tokens: as the server counts them, or as they were sent; 0 where neither is known.
    """

    scheduled_seconds: float
    started_seconds: float
    chunk_seconds: tuple[float, ...]
    num_tokens: int
    failure: str | None = None
    num_prompt_tokens: int = 0

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
    def e2e_seconds(self) -> float:
        """Scheduled arrival to last chunk; the answer has one."""
        return self.chunk_seconds[-1] - self.scheduled_seconds

    @property
    def gaps_seconds(self) -> list[float]:
        """The gaps between its chunks."""
        return [after - before for before, after in pairwise(self.chunk_seconds)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Every request of one load on one server.

    duration_seconds:   start of the load to the end of the last answer.
    client_cpu_seconds: processor time of the load generator in it.
    """

    results: tuple[RequestResult, ...]
    duration_seconds: float
    client_cpu_seconds: float

    @property
    def complete(self) -> list[RequestResult]:
        """The answers without a failure."""
        return [result for result in self.results if result.failure is None]

    @property
    def failures(self) -> list[str]:
        """Errors of the other answers."""
        return [result.failure for result in self.results if result.failure is not None]

    @property
    def latencies_seconds(self) -> dict[str, list[float]]:
        """By name (ttft, tpot, itl, e2el, as in the module's text): all values of the complete
        answers.
        """
        complete = self.complete
        return {
            "ttft": [result.ttft_seconds for result in complete],
            "tpot": [result.tpot_seconds for result in complete if result.tpot_seconds is not None],
            "itl": [gap for result in complete for gap in result.gaps_seconds],
            "e2el": [result.e2e_seconds for result in complete],
        }

    def num_good(self, slo: LatencyLimits) -> int:
        """Answers that meet the limits."""
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
