"""The load generator: sends requests to one target on schedule and records what a client sees.

A failed answer, also one with fewer tokens than asked for, is kept with its reason.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from pdcluster_api.errors import IncompleteAnswerError


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


REQUEST_LIMIT_SECONDS = 180.0
"""Time limit of one answer, by default."""

OnChunk = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """prompt: token ids, or text.  num_output_tokens: a maximum; exact with `ignore_eos`."""

    prompt: list[int] | str
    num_output_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    num_output_tokens: int
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Schedule of a load.

    arrivals_seconds: of each request from the start; None = as soon as concurrency allows
    limit_seconds:    timeout of one answer, from when its request is sent
    """

    arrivals_seconds: Sequence[float] | None = None
    max_concurrency: int | None = None
    limit_seconds: float = REQUEST_LIMIT_SECONDS


class LoadTarget(Protocol):
    async def send(self, request: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        """Calls on_chunk as each chunk arrives.  Raises IncompleteAnswerError."""
        ...


def poisson_arrivals(rate: float, count: int, seed: str) -> list[float]:
    """Seconds from the start: exponential gaps, scaled so that the mean rate is exact."""
    source = random.Random(f"arrivals {seed}")
    times = list(accumulate(source.expovariate(rate) for _ in range(count)))
    scale = count / rate / times[-1]
    return [time * scale for time in times]


def _ignore() -> None:
    pass


async def run_load(
    target: LoadTarget,
    requests: Sequence[BenchRequest],
    schedule: Arrivals,
    on_end: Callable[[], None] = _ignore,
) -> LoadResult:
    """Latencies count from a request's arrival time, also where it waits for concurrency.

    on_end: called after each answer
    """
    cpu_seconds, start = time.process_time(), time.monotonic()
    slots = (
        asyncio.Semaphore(schedule.max_concurrency) if schedule.max_concurrency else nullcontext()
    )

    async def client(index: int, request: BenchRequest) -> RequestResult:
        due = (
            None if schedule.arrivals_seconds is None else start + schedule.arrivals_seconds[index]
        )
        if due is not None:
            await asyncio.sleep(due - time.monotonic())
        async with slots:
            scheduled = time.monotonic() if due is None else due
            result = await _send(target, request, scheduled, schedule.limit_seconds)
        on_end()
        return result

    results = await asyncio.gather(
        *(client(index, request) for index, request in enumerate(requests))
    )
    return LoadResult(tuple(results), time.monotonic() - start, time.process_time() - cpu_seconds)


async def _send(
    target: LoadTarget, request: BenchRequest, scheduled: float, limit_seconds: float
) -> RequestResult:
    chunk_seconds: list[float] = []
    started = time.monotonic()
    counted, failure = TokenUsage(0), None
    try:
        async with asyncio.timeout(limit_seconds):
            counted = await target.send(request, lambda: chunk_seconds.append(time.monotonic()))
    except TimeoutError:
        failure = f"no complete answer in {limit_seconds:g} s"
    except IncompleteAnswerError as e:
        failure = str(e)
    if failure is None:
        failure = _shortfall(request, counted.num_output_tokens, len(chunk_seconds))
    num_prompt_tokens = counted.num_prompt_tokens or (
        0 if isinstance(request.prompt, str) else len(request.prompt)
    )
    return RequestResult(
        scheduled,
        started,
        tuple(chunk_seconds),
        counted.num_output_tokens,
        failure,
        num_prompt_tokens,
    )


def _shortfall(request: BenchRequest, num_tokens: int, num_chunks: int) -> str | None:
    is_complete = num_tokens == request.num_output_tokens or (not request.ignore_eos and num_tokens)
    if is_complete and num_chunks:
        return None
    return (
        f"{num_tokens} tokens in {num_chunks} chunks, expected {request.num_output_tokens} tokens"
    )
