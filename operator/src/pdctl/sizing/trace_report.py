"""Lengths, rates and shared prefixes that a plan took from a trace, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.sizing.search import SearchInput
from pdctl.sizing.workload import CACHE_SHARE, TraceWorkload


@dataclass(frozen=True)
class PlannedTrace:
    """caches: tokens of KV that a worker has, of all layouts that were tried"""

    name: str
    workload: TraceWorkload
    caches: Sequence[int]


def trace_lines(trace: PlannedTrace, given: SearchInput) -> Iterator[str]:
    """given: with the demand."""
    found, goal, demand = trace.workload, given.objective, given.demand
    assert demand is not None
    yield (
        f"From {trace.name}: {found.num_requests:.0f} requests in {_time(found.seconds)}; prompts "
        f"of {_lengths(found, 0)}, answers of {_lengths(found, 1)}."
    )
    what = "mean" if goal.percentile is None else f"p{goal.percentile:g}"
    yield (
        f"Taken from it: throughput by the mean lengths, TTFT by a prompt of "
        f"{goal.long_prompt(0).tokens:.0f} tokens ({what}), KV and ITL by streams of "
        f"{goal.stream[0]} and {goal.stream[1]}, as they run at any time."
    )
    yield (
        f"Sized for {_share(demand.percentile)} rate, {demand.requests_per_second:.3g} requests/s "
        f"({found.num_requests / found.seconds:.3g} in the mean): "
        f"{demand.prompts * found.input_tokens:.0f} prompt tokens/s and "
        f"{demand.answers * found.output_tokens:.0f} answer tokens/s, each in windows of up to "
        f"{found.window_seconds:.0f} s."
    )
    if found.trace is not None:
        low, high = (found.shared_ratio(of(trace.caches)) for of in (min, max))
        yield (
            f"Prefixes: {found.shared_ratio():.0%} of the prompt tokens come again; counted as "
            f"cached are {low:.0%} to {high:.0%}, by layout, which {CACHE_SHARE:.0%} of one "
            "worker's KV keeps where routing finds it."
        )


def _share(percentile: float) -> str:
    return "the peak of its" if percentile >= 100.0 else f"p{percentile:g} of its"


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.2g} s"


def _lengths(found: TraceWorkload, place: int) -> str:
    mean = found.output_tokens if place else found.input_tokens
    p50, p90, p99 = (found.percentile(place, each) for each in (50.0, 90.0, 99.0))
    return f"{mean:.0f} tokens in the mean (p50 {p50}, p90 {p90}, p99 {p99})"


def trace_json(trace: PlannedTrace, given: SearchInput) -> dict[str, Any]:
    """given: with the demand."""
    found, goal, demand = trace.workload, given.objective, given.demand
    assert demand is not None
    names = ("input_tokens", "output_tokens")
    return {
        "file": trace.name,
        "requests": found.num_requests,
        "seconds": found.seconds,
        "window_seconds": found.window_seconds,
        "rate_percentile": demand.percentile,
        "requests_per_second": demand.requests_per_second,
        "prompt_tokens_per_second": demand.prompts * found.input_tokens,
        "answer_tokens_per_second": demand.answers * found.output_tokens,
        "ttft_prompt_tokens": goal.long_prompt(0).tokens,
        "stream_tokens": list(goal.stream),
        "shared_prefix_ratio": found.shared_ratio(),
        **{
            name: {f"p{each}": found.percentile(place, each) for each in (50, 90, 99)}
            for place, name in enumerate(names)
        },
    }
