"""Moves the engine's own numbers into Prometheus: cumulative counters by their difference, gauges as they are.

One object for one engine process.  `engine_busy_ratio` is the share of the last
`WINDOW_SECONDS` that the engine spent in a step, by this process's clock, for
clocks do not cross processes; it is computed at each scrape, so it falls while
an idle engine sends nothing.
"""

from collections import deque
from collections.abc import Callable

from prometheus_client import Counter

from pdcluster_worker.engine.messages import EngineStats
from pdcluster_worker.metrics import Metrics

WINDOW_SECONDS = 5.0

_TOKEN_KINDS = ("prefill", "decode", "recomputed")
_USED_STATES = ("in_use", "receiving", "quarantined")


class EngineMetrics:
    """Takes every EngineStats of one engine, in order.  `clock` gives monotonic seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = clock()
        self._last: EngineStats | None = None
        self._busy: deque[tuple[float, float]] = deque([(self._start, 0.0)])  # (when, busy_seconds then)
        metrics.engine_busy_ratio.set_function(self.busy_ratio)

    def update(self, stats: EngineStats) -> None:
        """Bring all metrics to `stats`."""
        self._set_gauges(stats)
        for counter, now, before in _counters(self._metrics, stats, self._last):
            counter.inc(now - before)
        before_rows = self._last.failed_rows if self._last else {}
        for reason, count in stats.failed_rows.items():
            self._metrics.engine_failed_rows.labels(reason).inc(count - before_rows.get(reason, 0))
        for kind, seconds in stats.steps:
            self._metrics.engine_step_seconds.labels(kind).observe(seconds)
        for num_requests, *tokens in stats.batches:
            self._metrics.engine_step_requests.observe(num_requests)
            for kind, num_tokens in zip(_TOKEN_KINDS, tokens, strict=True):
                if num_tokens:
                    self._metrics.engine_step_tokens.labels(kind).observe(num_tokens)
        self._last = stats
        self._busy.append((self._clock(), stats.busy_seconds))
        self._forget()

    def busy_ratio(self) -> float:
        """Share of the last `WINDOW_SECONDS` (or of the time since the start) that was spent in steps, 0 to 1."""
        self._forget()
        elapsed = min(self._clock() - self._start, WINDOW_SECONDS)
        return min((self._busy[-1][1] - self._busy[0][1]) / elapsed, 1.0) if elapsed > 0 else 0.0

    def _forget(self) -> None:
        # One sample at or beyond the window's edge stays, to measure from: the engine was idle between two reports that lie far apart.
        edge = self._clock() - WINDOW_SECONDS
        while len(self._busy) > 1 and self._busy[1][0] <= edge:
            self._busy.popleft()

    def _set_gauges(self, stats: EngineStats) -> None:
        metrics = self._metrics
        metrics.num_requests_running.set(stats.num_running)
        metrics.fences_overdue.set(stats.fences_overdue)
        for state, count in stats.blocks.items():
            metrics.kv_blocks.labels(state).set(count)
        total = sum(stats.blocks.values())
        used = sum(stats.blocks.get(state, 0) for state in _USED_STATES)
        metrics.kv_cache_usage_ratio.set(used / total if total else 0.0)


def _counters(metrics: Metrics, stats: EngineStats, last: EngineStats | None) -> list[tuple[Counter, float, float]]:
    """(counter, cumulative value now, cumulative value at the report before)."""
    fields = {
        "engine_steps": "num_steps",
        "engine_overhead_seconds": "overhead_seconds",
        "prompt_tokens": "prompt_tokens",
        "prefill_tokens": "prefill_tokens",
        "generation_tokens": "generation_tokens",
        "prefill_seconds": "prefill_seconds",
        "decode_seconds": "decode_seconds",
        "prefix_cache_query_tokens": "prefix_query_tokens",
        "prefix_cache_hit_tokens": "prefix_hit_tokens",
        "prefix_cache_evictions": "evictions",
        "preemptions": "preemptions",
    }
    pairs = [(getattr(metrics, name), field) for name, field in fields.items()]
    pairs += [(metrics.kv_transfer_bytes.labels(way), f"bytes_{way}") for way in ("sent", "received")]
    pairs += [(metrics.engine_phase_seconds.labels(phase), f"{phase}_seconds") for phase in ("inputs", "forward", "sample")]
    return [(counter, getattr(stats, field), getattr(last, field) if last else 0) for counter, field in pairs]
