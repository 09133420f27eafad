"""Two pages of one worker to a WorkerSample: gauges as they are, counters as rates.

All counters belong to one life of the worker.  When any of them went back, or
the worker says that they began at another time, it is another life and no rate
is known; one counter is never believed across a restart that another shows.
A request counts where it came in, when its first token goes out.  A field of Page that
is not in `_GAUGES` counts as a counter.
"""

from dataclasses import dataclass, fields

from pdcluster_api.plan.autoscale.values import WorkerSample
from pdcluster_operator.scrape.page import MetricsPage

_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "prefill_queue_requests",
    "prefill_queue_tokens",
    "kv_cache_usage_ratio",
    "engine_busy_ratio",
    "gpu_utilization_ratio",
)
_COUNTERS = tuple(
    field.name
    for field in fields(MetricsPage)
    if field.name not in (*_GAUGES, "prompt_tokens_created")
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A page, and when it came, in seconds of a clock that never jumps."""

    at: float
    page: MetricsPage


def worker_sample(pod: str, now: Reading, before: Reading | None) -> WorkerSample:
    """Sample of the worker at `now`; rates and means since `before`, None = there is none."""
    gauges = {name: getattr(now.page, name) for name in _GAUGES}
    if before is None or not _is_same_process(now, before):
        return WorkerSample(pod, **gauges)
    grown = {name: getattr(now.page, name) - getattr(before.page, name) for name in _COUNTERS}
    seconds = now.at - before.at
    return WorkerSample(
        pod,
        **gauges,
        request_rate=grown["time_to_first_token_seconds_count"] / seconds,
        prompt_token_rate=grown["prompt_tokens_total"] / seconds,
        prefill_token_rate=grown["prefill_tokens_total"] / seconds,
        prefill_busy_rate=grown["prefill_seconds_total"] / seconds,
        generation_token_rate=grown["generation_tokens_total"] / seconds,
        time_to_first_token_seconds=_mean(
            grown["time_to_first_token_seconds_sum"], grown["time_to_first_token_seconds_count"]
        ),
        time_per_output_token_seconds=_mean(
            grown["time_per_output_token_seconds_sum"], grown["time_per_output_token_seconds_count"]
        ),
    )


def _is_same_process(now: Reading, before: Reading) -> bool:
    if now.at <= before.at or now.page.prompt_tokens_created != before.page.prompt_tokens_created:
        return False
    return all(getattr(now.page, name) >= getattr(before.page, name) for name in _COUNTERS)


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
