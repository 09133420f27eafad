"""Engine statistics as Prometheus metrics: counters by difference, gauges as sums."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

from prometheus_client import Counter

from pdcluster_worker.messages.engine import EngineStats, TierStats
from pdcluster_worker.metrics import Metrics

WINDOW_SECONDS = 5.0

_TOKEN_KINDS = ("prefill", "decode", "recomputed")


class EngineMetrics:
    """Takes every EngineStats of each engine, in order."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last: dict[int, EngineStats] = {}
        self._busy: dict[int, BusyTime] = {0: BusyTime(clock)}
        metrics.engine_busy_ratio.set_function(self.busy_ratio)

    def update(self, stats: EngineStats, rank: int = 0) -> None:
        last = self._last.get(rank)
        for counter, now, before in _counters(self._metrics, stats, last):
            counter.inc(now - before)
        before_rows = last.failed_rows if last else {}
        for reason, count in stats.failed_rows.items():
            self._metrics.engine_failed_rows.labels(reason).inc(count - before_rows.get(reason, 0))
        for kind, seconds in stats.steps:
            self._metrics.engine_step_seconds.labels(kind).observe(seconds)
        for num_requests, *tokens in stats.batches:
            self._metrics.engine_step_requests.observe(num_requests)
            for kind, num_tokens in zip(_TOKEN_KINDS, tokens, strict=True):
                if num_tokens:
                    self._metrics.engine_step_tokens.labels(kind).observe(num_tokens)
        self._count_delays(stats)
        self._count_drafts(stats, last)
        self._count_constraints(stats)
        self._count_tiers(stats, last)
        self._last[rank] = stats
        self._busy.setdefault(rank, BusyTime(self._clock)).add(stats.busy_seconds)
        self._set_gauges()

    def forget(self, rank: int, *, for_good: bool) -> None:
        """Its engine has ended: the next one of that rank counts from 0."""
        if self._last.pop(rank, None) is not None:
            self._set_gauges()
        if for_good:
            self._busy.pop(rank, None)
        else:
            self._busy[rank] = BusyTime(self._clock)

    def busy_ratio(self) -> float:
        """Share of the last `WINDOW_SECONDS` spent in steps; the mean of several engines."""
        return sum(busy.ratio() for busy in self._busy.values()) / len(self._busy)

    def _count_delays(self, stats: EngineStats) -> None:
        metrics = self._metrics
        for status, allowed, reason, executed, count in stats.delay_outcomes:
            metrics.prefill_delayer_outcomes.labels(
                status, str(allowed).lower(), reason, str(executed).lower()
            ).inc(count)
        for passes, seconds in stats.delay_waits:
            metrics.prefill_delayer_wait_passes.observe(passes)
            metrics.prefill_delayer_wait_seconds.observe(seconds)

    def _count_constraints(self, stats: EngineStats) -> None:
        metrics = self._metrics
        for kind, count in stats.constraint_requests:
            metrics.structured_requests.labels(kind).inc(count)
        metrics.grammar_cache_hits.inc(stats.constraint_hits)
        for outcome, seconds in stats.constraint_compiles:
            metrics.grammar_compile_seconds.labels(outcome).observe(seconds)

    def _count_drafts(self, stats: EngineStats, last: EngineStats | None) -> None:
        drafted = _differences(stats.drafted, last.drafted if last else [])
        accepted = _differences(stats.accepted, last.accepted if last else [])
        metrics = self._metrics
        for counter, counts in (
            (metrics.spec_decode_draft_tokens, drafted),
            (metrics.spec_decode_accepted_tokens, accepted),
        ):
            for position, count in enumerate(counts):
                counter.labels(str(position)).inc(count)
        # A draft is right only where those before it are: so many requests had each number of right
        # ones, and a token more.
        at_least = [*drafted[:1], *accepted, 0]
        for num_accepted, (count, more) in enumerate(pairwise(at_least)):
            for _ in range(count - more):
                metrics.spec_decode_emitted_tokens.observe(num_accepted + 1)

    def _count_tiers(self, stats: EngineStats, last: EngineStats | None) -> None:
        metrics, before = self._metrics, {tier.name: tier for tier in last.tiers} if last else {}
        for tier in stats.tiers:
            past = before.get(tier.name, TierStats(tier.name, tier.num_slots))
            for counter, field in (
                (metrics.kv_tier_bytes.labels(tier.name, "saved"), "saved_bytes"),
                (metrics.kv_tier_bytes.labels(tier.name, "loaded"), "loaded_bytes"),
                (metrics.kv_tier_evictions.labels(tier.name), "evictions"),
                (metrics.kv_tier_damaged_blocks.labels(tier.name), "damaged"),
                (metrics.kv_tier_absent_blocks.labels(tier.name), "absent"),
                (metrics.kv_tier_failures.labels(tier.name), "failures"),
            ):
                counter.inc(getattr(tier, field) - getattr(past, field))
        choices = last.tier_reads if last else {}
        for choice, count in stats.tier_reads.items():
            metrics.kv_tier_reads.labels(choice).inc(count - choices.get(choice, 0))
        outcomes = last.tier_lookups if last else {}
        for outcome, count in stats.tier_lookups.items():
            metrics.kv_tier_lookups.labels(outcome).inc(count - outcomes.get(outcome, 0))

    def _set_gauges(self) -> None:
        metrics, all_stats = self._metrics, list(self._last.values())
        metrics.num_requests_running.set(sum(stats.num_running for stats in all_stats))
        metrics.fences_overdue.set(sum(stats.fences_overdue for stats in all_stats))
        blocks = {
            state: sum(stats.blocks.get(state, 0) for stats in all_stats)
            for stats in all_stats
            for state in stats.blocks
        }
        for state, count in blocks.items():
            metrics.kv_blocks.labels(state).set(count)
        for tier in (tier for stats in all_stats[:1] for tier in stats.tiers):
            same = [each for stats in all_stats for each in stats.tiers if each.name == tier.name]
            metrics.kv_tier_blocks.labels(tier.name, "stored").set(sum(t.stored for t in same))
            metrics.kv_tier_blocks.labels(tier.name, "all").set(sum(t.num_slots for t in same))
            full = sum(bool(each.reason) for each in same)
            metrics.kv_tier_stopped.labels(tier.name).set(full)
        total = sum(blocks.values())
        used = sum(stats.used_blocks for stats in all_stats)
        metrics.kv_cache_usage_ratio.set(used / total if total else 0.0)


class BusyTime:
    """Share of the last `WINDOW_SECONDS` that one engine spent in steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        # (when, busy_seconds then)
        self._busy: deque[tuple[float, float]] = deque([(self._start, 0.0)])

    def add(self, busy_seconds: float) -> None:
        self._busy.append((self._clock(), busy_seconds))
        self._forget()

    def ratio(self) -> float:
        self._forget()
        elapsed = min(self._clock() - self._start, WINDOW_SECONDS)
        return min((self._busy[-1][1] - self._busy[0][1]) / elapsed, 1.0) if elapsed > 0 else 0.0

    def _forget(self) -> None:
        # One sample at or beyond the window's edge stays, to measure from: the engine was idle
        # between two reports that lie far apart.
        edge = self._clock() - WINDOW_SECONDS
        while len(self._busy) > 1 and self._busy[1][0] <= edge:
            self._busy.popleft()


def _differences(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [count - past for count, past in zip_longest(now, before, fillvalue=0)]


def _counters(
    metrics: Metrics, stats: EngineStats, last: EngineStats | None
) -> list[tuple[Counter, float, float]]:
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
    pairs += [
        (metrics.kv_transfer_bytes.labels(way), f"bytes_{way}") for way in ("sent", "received")
    ]
    pairs += [
        (metrics.engine_phase_seconds.labels(phase), f"{phase}_seconds")
        for phase in ("inputs", "forward", "sample")
    ]
    return [
        (counter, getattr(stats, field), getattr(last, field) if last else 0)
        for counter, field in pairs
    ]
