"""Results as JSON and as text, with the keys of vLLM's results; `_ms` keys are milliseconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, median, pstdev
from typing import Any

from pdctl.bench.load import LatencyLimits, LoadResult, percentile

NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Reporting:
    """Contents of a result.

    percentiles: of each metric, beside mean, median and standard deviation
    slo:         limits of the goodput
    detailed:    adds lists with a value for each request
    """

    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)
    slo: LatencyLimits | None = None
    detailed: bool = False


def serve_result(
    run: LoadResult, setting: Mapping[str, Any], reporting: Reporting
) -> dict[str, Any]:
    seconds = run.duration_seconds
    num_input = sum(each_result.num_prompt_tokens for each_result in run.complete)
    num_output = sum(each_result.num_tokens for each_result in run.complete)
    slo = reporting.slo
    result = {
        "date": f"{datetime.now(UTC):%Y%m%d-%H%M%S}",
        **setting,
        "duration": seconds,
        "completed": len(run.complete),
        "failed": len(run.failures),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(run.complete) / seconds,
        "request_goodput": None if slo is None else run.num_good(slo) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
    }
    for name, values in run.latencies_seconds.items():
        if name in reporting.metrics and values:
            result |= _spread(name, values, reporting.percentiles)
    return result | (_details(run) if reporting.detailed else {})


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = [1e3 * value for value in seconds]
    found = {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": median(values),
        f"std_{name}_ms": pstdev(values),
    }
    return found | {f"p{p:g}_{name}_ms": percentile(values, p) for p in percentiles}


def _details(run: LoadResult) -> dict[str, Any]:
    """Lists in the order of the requests; a failed one has its error and no times."""
    return {
        "input_lens": [each_result.num_prompt_tokens for each_result in run.results],
        "output_lens": [each_result.num_tokens for each_result in run.results],
        "start_times": [each_result.started_seconds for each_result in run.results],
        "ttfts": [0.0 if one.failure else one.ttft_seconds for one in run.results],
        "itls": [[] if one.failure else one.gaps_seconds for one in run.results],
        "errors": [each_result.failure or "" for each_result in run.results],
    }


def serve_text(result: Mapping[str, Any], failures: Sequence[str]) -> str:
    rows: list[tuple[str, float]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    rows.append(("Output token throughput (tok/s):", result["output_throughput"]))
    rows.append(("Total token throughput (tok/s):", result["total_token_throughput"]))
    lines = [f"{' Serving Benchmark Result ':=^50}", *(_line(*row) for row in rows)]
    for name, title in NAMES.items():
        if f"mean_{name}_ms" in result:
            lines.append(f"{title:-^50}")
            lines += _latency_lines(result, name)
    reasons = [f"failed: {reason}" for reason in sorted(set(failures))]
    return "\n".join([*lines, "=" * 50, *reasons])


def _latency_lines(result: Mapping[str, Any], name: str) -> list[str]:
    keys = [key for key in result if key.endswith(f"_{name}_ms") and not key.startswith("std_")]
    words = {key: key.removesuffix(f"_{name}_ms") for key in keys}
    return [
        _line(f"{word.capitalize()} {name.upper()} (ms):", result[key])
        for key, word in words.items()
    ]


def _line(title: str, value: float) -> str:
    return f"{title:<40} {value:<9}" if isinstance(value, int) else f"{title:<40} {value:<9.2f}"


def latency_result(seconds: Sequence[float]) -> dict[str, Any]:
    """Keys of vLLM's `bench latency`."""
    return {
        "avg_latency": fmean(seconds),
        "latencies": list(seconds),
        "percentiles": {str(p): percentile(seconds, p) for p in LATENCY_PERCENTILES},
    }


def throughput_result(run: LoadResult) -> dict[str, Any]:
    """Keys of vLLM's `bench throughput`, and the output tokens alone."""
    num_output = sum(each_result.num_tokens for each_result in run.complete)
    num_tokens = num_output + sum(each_result.num_prompt_tokens for each_result in run.complete)
    return {
        "elapsed_time": run.duration_seconds,
        "num_requests": len(run.complete),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(run.complete) / run.duration_seconds,
        "tokens_per_second": num_tokens / run.duration_seconds,
        "output_tokens_per_second": num_output / run.duration_seconds,
    }
