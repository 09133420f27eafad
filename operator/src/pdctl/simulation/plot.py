"""A simulation as a picture: load and goodput, latencies, queues, use of the KV, replicas."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pdcluster_schema.autoscale import AutoscaleSpec
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_simulator.results import ClusterSample, IntervalFigures
from pdctl.figures import BLUE, GREEN, GREY, ORANGE, RED, drawn, legend_right, mark_level
from pdctl.simulation.report import SimulationReport, objectives_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHTS = (1.8, 1.8, 1.8, 1.6, 1.6, 1.9)
_LONG_SECONDS = 7200.0
_COLORS = {"prefill": BLUE, "decode": ORANGE, "mixed": GREEN}


def draw(report: SimulationReport, spec: PDClusterSpec, path: Path) -> None:
    """With the thresholds of an autoscaler that took part.  Raises OSError."""
    moments, samples = report.moments, report.result.recorder.samples
    ttft_seconds, tpot_seconds = objectives_of(spec)
    unit = 3600.0 if moments[-1].seconds > _LONG_SECONDS else 1.0
    at = [moment.seconds / unit for moment in moments]
    when = [sample.seconds / unit for sample in samples]
    figures = {"moments": [asdict(moment) for moment in moments]}
    title = f"{report.name}: simulated"
    with drawn(path, title, _HEIGHTS, figures, shares_x=True) as rows:
        _draw_rates(rows[0], at, moments)
        _draw_latency(rows[1], at, moments, ttft_seconds)
        _draw_pace(rows[2], at, moments, tpot_seconds)
        _draw_queues(rows[3], when, samples)
        _draw_usage(rows[4], when, samples)
        _draw_replicas(rows[5], when, samples)
        if report.result.decisions:
            _draw_thresholds(rows[3], rows[4], spec.autoscale)
        for axes in rows:
            axes.set_ylim(bottom=0.0)
            legend_right(axes)
        rows[-1].set_xlabel("hours" if unit > 1.0 else "seconds")


def _draw_rates(axes: "Axes", at: Sequence[float], moments: Sequence[IntervalFigures]) -> None:
    axes.plot(at, [moment.arrived for moment in moments], color=GREY, label="arrived")
    axes.plot(at, [moment.completed for moment in moments], color=BLUE, label="completed")
    axes.plot(at, [moment.good for moment in moments], color=GREEN, label="within objectives")
    axes.set_title("Requests")
    axes.set_ylabel("requests/s")


def _draw_latency(
    axes: "Axes", at: Sequence[float], moments: Sequence[IntervalFigures], objective: float
) -> None:
    axes.plot(at, [_nan(each.ttft_p50) for each in moments], color=BLUE, label="median")
    axes.plot(at, [_nan(each.ttft_p90) for each in moments], color=BLUE, ls="--", label="p90")
    mark_level(axes, objective, f"objective: {objective:g} s", color=RED)
    axes.set_title("Time to first token, by when a request ended")
    axes.set_ylabel("s")


def _draw_pace(
    axes: "Axes", at: Sequence[float], moments: Sequence[IntervalFigures], objective: float | None
) -> None:
    paces = [1e3 * _nan(each.tpot_p90) for each in moments]
    axes.plot(at, paces, color=ORANGE, ls="--", label="p90")
    if objective is not None:
        mark_level(axes, 1e3 * objective, f"objective: {1e3 * objective:g} ms", color=RED)
    axes.set_title("Time per output token of a request")
    axes.set_ylabel("ms")


def _draw_queues(axes: "Axes", when: Sequence[float], samples: Sequence[ClusterSample]) -> None:
    for role in _roles(samples):
        queued = [sample.queued.get(role, 0) for sample in samples]
        axes.plot(when, queued, color=_COLORS[role], label=f"at {role} workers")
    axes.set_title("Requests that wait for a credit or for an engine")
    axes.set_ylabel("requests")


def _draw_usage(axes: "Axes", when: Sequence[float], samples: Sequence[ClusterSample]) -> None:
    for role in _roles(samples):
        usage = [100.0 * sample.kv_usage.get(role, 0.0) for sample in samples]
        busy = [100.0 * sample.busy.get(role, 0.0) for sample in samples]
        axes.plot(when, usage, color=_COLORS[role], label=f"KV, {role}")
        axes.plot(when, busy, color=_COLORS[role], ls=":", label=f"busy, {role}")
    axes.set_title("Use of the workers")
    axes.set_ylabel("%")


def _draw_thresholds(queues: "Axes", usage: "Axes", autoscale: AutoscaleSpec) -> None:
    prefill, decode = autoscale.prefill, autoscale.decode
    for role, queue, shares in (
        ("prefill", prefill.queue_up, (prefill.utilization_down, prefill.utilization_up)),
        ("decode", decode.queue_up, (decode.kv_usage_down, decode.kv_usage_up)),
    ):
        queues.axhline(queue, color=_COLORS[role], ls=":", linewidth=1.0)
        for share in shares:
            usage.axhline(100.0 * share, color=_COLORS[role], ls="-.", linewidth=1.0)
    queues.set_title("Requests that wait for a credit or for an engine (dotted: thresholds)")
    usage.set_title("Use of the workers (dots and dashes: thresholds)")


def _draw_replicas(axes: "Axes", when: Sequence[float], samples: Sequence[ClusterSample]) -> None:
    for pool in sorted({pool for sample in samples for pool in sample.replicas}):
        color = _COLORS[pool.partition("/")[0]]
        replicas = [sample.replicas.get(pool, 0) for sample in samples]
        ready = [sample.ready.get(pool, 0) for sample in samples]
        axes.step(when, replicas, where="post", color=color, label=f"{pool} asked for")
        axes.fill_between(when, ready, step="post", color=color, alpha=0.2, label=f"{pool} ready")
    axes.set_title("Workers")
    axes.set_ylabel("workers")


def _roles(samples: Sequence[ClusterSample]) -> list[str]:
    return sorted({role for sample in samples for role in sample.queued})


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
