"""The signals of a role: each number beside its thresholds, and the workers that it asks for. A
role grows when one is over its scale-up threshold, and shrinks when all are under theirs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdcluster_api.plan.autoscale.latency import MeasuredLatency
from pdcluster_api.plan.autoscale.rules import MAX_GROWTH, WORK_OFF_SECONDS
from pdcluster_api.plan.autoscale.totals import Totals
from pdcluster_api.plan.autoscale.values import short
from pdcluster_api.plan.observed.state import DecisionInput
from pdcluster_schema.autoscale import AutoscaleSpec, DecodeScalingSpec, PrefillScalingSpec

_MOST_TIMES = 16  # a threshold near 0 asks for no more times the workers in one decision
KV_USAGE = "kv_cache_usage_ratio"
_DUST = 1e-9  # what rounding may add to a number of workers


@dataclass(frozen=True)
class Signal:
    name: str
    value: float | None
    up: float
    # None = it never asks for fewer workers, it only forbids it while it is over `up`
    down: float | None
    need: float  # workers at which it would be at its scale-up threshold
    sum: str  # arithmetic of `need`, as text
    peak: float  # of the busiest worker; the mean where workers have none of their own
    is_load: bool = False  # whether `need` holds at any value, or only over the threshold
    is_share: bool = False  # whether it cannot be more than 1
    falls: float = 0.0  # of a queue, requests fewer in a second
    latency: MeasuredLatency | None = None  # that it judges; None = it is no objective

    def is_over(self, tolerance: float = 0.0) -> bool:
        """Over the scale-up threshold plus the tolerance, which for a share stays below 1."""
        threshold = self.up * (1.0 + tolerance)
        if self.is_share:
            threshold = min(threshold, (self.up + 1.0) / 2.0)
        return self.value is not None and self.value > threshold

    def is_under(self, tolerance: float = 0.0) -> bool:
        """At or under the scale-down threshold less the tolerance; without one: not over."""
        if self.down is None or self.value is None:
            return not self.is_over()
        return self.value <= self.down * (1.0 - tolerance)

    def worked_off_seconds(self) -> float:
        """Time until a queue is under its threshold; infinite where it does not fall."""
        left = max(0.0, (self.value or 0.0) - self.up)
        return left / self.falls if self.falls > 0.0 else math.inf

    def describe(self) -> str:
        word = "over" if self.is_over() else "under"
        threshold = self.up if self.is_over() or self.down is None else self.down
        return f"{self.name} {short(self.value)} {word} {short(threshold)}"

    def input(self, role: str) -> DecisionInput:
        value = None if self.value is None else round(self.value, 4)
        return DecisionInput(role, self.name, value, round(self.up, 4))


def signals_of(
    role: str,
    own: Totals,
    ingress: Totals,
    spec: AutoscaleSpec,
    latencies: Sequence[MeasuredLatency] = (),
) -> tuple[Signal, ...]:
    """ingress: totals of the workers that answer HTTP: `own`, unless the role is prefill"""
    if own.workers == 0:
        return ()
    judged = {each.kind: each for each in latencies}
    found = (
        _prefill(own, ingress, spec.prefill, judged.get("ttft"))
        if role == "prefill"
        else _decode(own, spec.decode)
    )
    return (*found, *(_objective(each, own) for each in latencies))


def _prefill(
    own: Totals, ingress: Totals, spec: PrefillScalingSpec, ttft: MeasuredLatency | None
) -> Iterator[Signal]:
    requests = own.prefill_queue_requests + ingress.prefill_queue_requests
    change = own.prefill_queue_requests_change + ingress.prefill_queue_requests_change
    queue, limits = (requests, change), (spec.queue_up, spec.queue_down)
    yield _queue("prefill_queue_requests", queue, limits, own)
    name = "gpu_utilization_ratio" if own.has_gpu else "engine_busy_ratio"
    measured = own.utilization, own.peak_utilization
    yield _share(name, measured, (spec.utilization_up, spec.utilization_down), own.workers)
    speed = own.prefill_speed
    if spec.backlog_up_seconds is not None:
        tokens = own.prefill_queue_tokens + ingress.prefill_queue_tokens
        seconds = None if speed is None else tokens / (speed * own.workers)
        yield _latency("prefill_backlog_seconds", seconds, spec.backlog_up_seconds, own)
    demand = None if ttft is None else prefill_demand(own, ingress, ttft.observed.mean)
    if demand is not None:
        text = f"{short(demand)} workers' worth of prompts at {short(speed)} tokens/s"
        yield Signal(
            name="prefill_demand_workers",
            value=demand,
            up=float(own.workers),
            down=None,
            need=demand,
            sum=text,
            peak=demand / own.workers,
            is_load=True,
        )


def _decode(own: Totals, spec: DecodeScalingSpec) -> Iterator[Signal]:
    queue = own.num_requests_waiting, own.num_requests_waiting_change
    yield _queue("num_requests_waiting", queue, (spec.queue_up, spec.queue_down), own)
    usage = own.kv_cache_usage, own.peak_kv_cache_usage
    limits = spec.kv_usage_up, spec.kv_usage_down
    yield _share(KV_USAGE, usage, limits, own.workers)


def _objective(latency: MeasuredLatency, own: Totals) -> Signal:
    seconds, target = latency.seconds, latency.objective.seconds
    if latency.kind != "itl":
        return replace(_latency(latency.name, seconds, target, own), latency=latency)
    # each worker's steps are faster with fewer streams, so it is a load at any value
    need = 0.0 if seconds is None else decode_need(own.workers, seconds, target)
    text = _times(own.workers, seconds, target, need)
    peak = seconds or 0.0
    return Signal(
        latency.name, seconds, target, None, need, text, peak, is_load=True, latency=latency
    )


def _queue(
    name: str, queue: tuple[float, float], thresholds: tuple[int, int], own: Totals
) -> Signal:
    """queue: requests, and how many more in a second."""
    (requests, change), (up, down), settled = queue, thresholds, own.settled
    need, text = settled + requests / up - 1.0, f"{settled} + {short(requests)} / {up} - 1"
    if settled * MAX_GROWTH < need:
        need, text = settled * MAX_GROWTH, f"{settled} x {MAX_GROWTH:g} at most"
    if change < 0.0 and settled + 1.0 < need:
        need, text = settled + 1.0, f"{settled} + 1, it falls by {short(-change)} a second"
    falls = max(0.0, -change)
    return Signal(name, requests, float(up), float(down), need, text, requests, falls=falls)


def _latency(name: str, seconds: float | None, target: float, own: Totals) -> Signal:
    need = 0.0 if seconds is None else own.settled * min(seconds / target, MAX_GROWTH)
    text = _times(own.settled, seconds, target, need)
    return Signal(name, seconds, target, None, need, text, seconds or 0.0)


def _times(workers: int, seconds: float | None, target: float, need: float) -> str:
    if need >= workers * MAX_GROWTH:
        return f"{workers} x {MAX_GROWTH:g} at most"
    return f"{workers} x {short(seconds)} / {short(target)}"


def _share(
    name: str, measured: tuple[float, float], thresholds: tuple[float, float], workers: int
) -> Signal:
    """measured: the sum over the workers, and the greatest of one worker."""
    (total, peak), (up, down) = measured, thresholds
    need, text = total / up, f"{workers} x {short(total / workers)} / {short(up)}"
    if _MOST_TIMES * workers < need:
        need, text = float(_MOST_TIMES * workers), f"{workers} x {_MOST_TIMES} at most"
    mean = total / workers
    return Signal(name, mean, up, down, need, text, peak, is_load=True, is_share=True)


def being_worked_off(signals: Sequence[Signal], tolerance: float) -> Signal | None:
    """A queue over its threshold that soon is under it: no new load."""
    queues = [signal for signal in signals if signal.falls > 0.0 and signal.is_over(tolerance)]
    return next((queue for queue in queues if queue.worked_off_seconds() <= WORK_OFF_SECONDS), None)


def ceil_workers(need: float) -> int:
    """Whole workers, what rounding added to the number left out.

    >>> ceil_workers(0.1 * 3 / 0.1), ceil_workers(3.01)
    (3, 4)
    """
    return math.ceil(need - _DUST)


def prefill_need(token_rate: float, speed: float, correction: float) -> float:
    """Prefill workers for a demand, as in Dynamo's SLA planner. token_rate: prompt tokens per
    second; speed: those of one worker; correction: measured time to first token over the expected
    one, below 1 by the prefix cache, above 1 by queueing
    """
    return token_rate * min(1.0, correction) / speed


def decode_need(workers: int, seconds: float, target: float) -> float:
    """Decode workers that bring the time per token to its target, by the planner's correction."""
    return workers * min(seconds / target, MAX_GROWTH)


def prefill_demand(own: Totals, ingress: Totals, ttft: float | None) -> float | None:
    """Workers for the prompts that come in now; None = not enough was measured.

    own:     of the prefill workers
    ingress: of the workers that answer HTTP; what they prefill themselves is no demand
    """
    speed, remote = own.prefill_speed, own.prefill_token_rate
    prompts, requests = ingress.prompt_token_rate, ingress.request_rate
    if ttft is None or speed is None or not remote or not prompts or not requests:
        return None
    correction = ttft * speed * requests / prompts
    share = remote / (remote + (ingress.prefill_token_rate or 0.0))
    need = prefill_need(prompts * share, speed, correction)
    return min(need, MAX_GROWTH * (own.reporting + own.missing))
