"""A replay as a picture: load, queues, signals, latencies against their SLOs, and workers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdcluster_schema.pdcluster import PDClusterSpec
from pdctl.figures import BLUE, ORANGE, RED, drawn, legend_right, mark_level, scale_by_ratio
from pdctl.replay.report import ROLES, columns
from pdctl.replay.run import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"prefill": BLUE, "decode": ORANGE}
_HEIGHTS = (1.5, 1.5, 1.5, 1.6, 1.6, 1.9, 1.9)
_LONG_HOURS = 3.0
_MANY = 5.0  # SLOs high: on a linear axis it would lie on the bottom line


def draw(moments: Sequence[Moment], spec: PDClusterSpec, title: str, path: Path) -> None:
    """Raises OSError."""
    is_long = moments[-1].load.seconds > _LONG_HOURS * 3600.0
    at = [moment.load.seconds / (3600.0 if is_long else 60.0) for moment in moments]
    with drawn(path, title, _HEIGHTS, columns(moments), shares_x=True) as rows:
        _draw_demand(rows[0], at, moments)
        _draw_queues(rows[1], at, moments, spec)
        _draw_signals(rows[2], at, moments, spec)
        for axes, latency in zip(rows[3:5], _latencies(moments, spec), strict=True):
            _draw_latency(axes, at, moments, latency)
        for axes, role in zip(rows[5:], ROLES, strict=True):
            _draw_workers(axes, at, moments, role)
        for axes in rows:
            axes.set_xlim(at[0], at[-1])
            if axes.get_yscale() == "linear":
                axes.set_ylim(0.0, 1.05 * max(axes.get_ylim()[1], 1e-6))
            legend_right(axes)
        rows[-1].set_xlabel("hours" if is_long else "minutes")


def _draw_demand(axes: "Axes", at: Sequence[float], moments: Sequence[Moment]) -> None:
    loads = [moment.load for moment in moments]
    prompts = [load.requests_per_second * load.input_tokens / 1000.0 for load in loads]
    answers = [load.requests_per_second * load.output_tokens / 1000.0 for load in loads]
    axes.plot(at, prompts, color=_COLORS["prefill"], label="of prompts")
    axes.plot(at, answers, color=_COLORS["decode"], label="of answers")
    axes.set_title("Load that arrives")
    axes.set_ylabel("1000 tokens/s")


def _draw_queues(
    axes: "Axes", at: Sequence[float], moments: Sequence[Moment], spec: PDClusterSpec
) -> None:
    prefill = [moment.prefill_queue_requests for moment in moments]
    decode = [moment.num_requests_waiting for moment in moments]
    axes.plot(at, prefill, color=_COLORS["prefill"], label="prefill queue")
    axes.plot(at, decode, color=_COLORS["decode"], label="waiting for decode")
    _thresholds(axes, "prefill", spec.autoscale.prefill.queue_up)
    _thresholds(axes, "decode", spec.autoscale.decode.queue_up)
    axes.set_title("Requests that wait (dotted: thresholds of the autoscaler)")
    axes.set_ylabel("requests")


def _draw_signals(
    axes: "Axes", at: Sequence[float], moments: Sequence[Moment], spec: PDClusterSpec
) -> None:
    busy = [100.0 * moment.engine_busy_ratio for moment in moments]
    usage = [100.0 * moment.kv_cache_usage_ratio for moment in moments]
    axes.plot(at, busy, color=_COLORS["prefill"], linewidth=1.0, label="prefill utilization")
    axes.plot(at, usage, color=_COLORS["decode"], linewidth=1.0, label="decode KV usage")
    prefill, decode = spec.autoscale.prefill, spec.autoscale.decode
    _thresholds(axes, "prefill", 100.0 * prefill.utilization_down, 100.0 * prefill.utilization_up)
    _thresholds(axes, "decode", 100.0 * decode.kv_usage_down, 100.0 * decode.kv_usage_up)
    axes.set_title("Use of the workers that are ready (dotted: thresholds of the autoscaler)")
    axes.set_ylabel("%")


def _thresholds(axes: "Axes", role: str, *values: float) -> None:
    for value in values:
        axes.axhline(value, color=_COLORS[role], linestyle=":", linewidth=1.0)


@dataclass(frozen=True)
class _Latency:
    """values: of each interval, None = nothing was served; slo: in the same unit."""

    role: str
    name: str
    unit: str
    values: Sequence[float | None]
    slo: float | None


def _latencies(moments: Sequence[Moment], spec: PDClusterSpec) -> tuple[_Latency, _Latency]:
    ttft = [moment.ttft_seconds for moment in moments]
    tpot = [None if one.tpot_seconds is None else 1e3 * one.tpot_seconds for one in moments]
    slo = spec.qos.slo
    return (
        _Latency("prefill", "Time to first token", "s", ttft, slo.ttft_milliseconds / 1e3),
        _Latency("decode", "Time per output token", "ms", tpot, slo.tpot_milliseconds),
    )


def _draw_latency(
    axes: "Axes", at: Sequence[float], moments: Sequence[Moment], latency: _Latency
) -> None:
    values = [math.nan if value is None else value for value in latency.values]
    axes.plot(at, values, color=_COLORS[latency.role], label="mean of an interval")
    title, slo = latency.name, latency.slo
    if slo is not None:
        rates = [moment.load.requests_per_second for moment in moments]
        over = sum(rate for rate, value in zip(rates, values, strict=True) if value > slo)
        title += (
            f": {over / (sum(rates) or 1.0):.1%} of the requests came while it was over the SLO"
        )
        mark_level(axes, slo, f"SLO: {slo:g} {latency.unit}", color=RED)
        if max(value for value in (*values, slo) if not math.isnan(value)) > _MANY * slo:
            scale_by_ratio(axes)
    axes.set_title(title)
    axes.set_ylabel(latency.unit)


def _draw_workers(axes: "Axes", at: Sequence[float], moments: Sequence[Moment], role: str) -> None:
    pools = [[pool for pool in moment.pools.values() if pool.role == role] for moment in moments]
    replicas = [sum(pool.replicas for pool in each) for each in pools]
    ready = [sum(pool.ready for pool in each) for each in pools]
    ends = [sum(pool.ready + pool.draining for pool in each) for each in pools]
    axes.fill_between(at, ready, step="post", color=_COLORS[role], alpha=0.3, label="ready")
    axes.fill_between(at, ready, ends, step="post", color=RED, linewidth=0.0, label="draining")
    axes.step(at, replicas, where="post", color=_COLORS[role], label="asked for")
    demand = [moment.demand[role] for moment in moments]
    axes.plot(at, demand, color="black", linestyle="--", linewidth=1.0, label="needed by the load")
    axes.locator_params(axis="y", integer=True)
    axes.set_title(f"{role.capitalize()} workers")
    axes.set_ylabel("workers")
