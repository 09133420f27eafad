"""Plots of measurements: distributions of latencies, and autotune's trials with their front."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdctl.bench.load import LatencyLimits, LoadResult, percentile
from pdctl.bench.result import NAMES
from pdctl.bench.tuning import SCHEDULERS, CompletedTrial, LatencyTargets, SearchResult, front
from pdctl.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PERCENTILES,
    RED,
    drawn,
    legend_right,
    mark,
    mark_level,
    scale_by_ratio,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_INCHES = 2.4
_SHOWN = ("ttft", "tpot", "itl")
_LOOKS = {
    name: (color, marker)
    for name, color, marker in zip(SCHEDULERS, (BLUE, ORANGE, GREEN), "osD", strict=True)
}


def draw_latencies(
    path: Path, title: str, run: LoadResult, slo: LatencyLimits | None = None
) -> None:
    """Cumulative distributions over the complete answers.  Raises OSError."""
    found = {name: values for name, values in run.latencies_seconds.items() if values}
    limits = _limits_of(slo)
    shown = [name for name in found if name in _SHOWN or name in limits]
    heights = [_PANEL_INCHES] * max(1, len(shown))
    figures: dict[str, Any] = {"failed": len(run.failures)}
    with drawn(path, title, heights, figures) as rows:
        if not shown:
            rows[0].set_title("No answer was complete")
        for axes, name in zip(rows, shown, strict=False):
            values = sorted(1e3 * value for value in found[name])
            figures[name] = _draw_distribution(axes, NAMES[name], values, limits.get(name))


def _limits_of(slo: LatencyLimits | None) -> Mapping[str, float]:
    if slo is None:
        return {}
    given = {"ttft": slo.ttft_seconds, "tpot": slo.tpot_seconds, "e2el": slo.e2e_seconds}
    return {name: 1e3 * seconds for name, seconds in given.items() if seconds is not None}


def _draw_distribution(
    axes: "Axes", name: str, ordered: Sequence[float], limit: float | None
) -> dict[str, Any]:
    shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *shares], where="post", color=BLUE, linewidth=2)
    marks = {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    for line, (label, value) in zip(PERCENTILES.values(), marks.items(), strict=True):
        mark(axes, value, f"{label}: {short(value)} ms", line=line)
    figures: dict[str, Any] = {"values_ms": ordered, **{f"{p}_ms": v for p, v in marks.items()}}
    title = name
    if limit is not None:
        within = sum(value <= limit for value in ordered) / len(ordered)
        mark(axes, limit, f"SLO: {limit:g} ms", color=RED)
        title += f": {within:.1%} within the SLO of {limit:g} ms"
        figures |= {"slo_ms": limit, "within_slo_ratio": within}
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("at most so long,\n% of all")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    legend_right(axes)
    return figures


def draw_batches(path: Path, title: str, seconds: Sequence[float]) -> None:
    """Raises OSError."""
    marks = {f"p{p}": percentile(seconds, p) for p in PERCENTILES}
    figures = {"seconds": list(seconds)} | {f"{p}_seconds": value for p, value in marks.items()}
    with drawn(path, title, [3.5], figures) as (axes,):
        axes.plot(range(1, len(seconds) + 1), seconds, color=BLUE, marker="o", linewidth=1)
        for line, (label, value) in zip(PERCENTILES.values(), marks.items(), strict=True):
            mark_level(axes, value, f"{label}: {short(value)} s", line=line)
        axes.set_title("Time of each batch, from the first request sent to the last token")
        axes.set_xlabel("batch")
        axes.set_ylabel("seconds")
        axes.set_ylim(0, 1.1 * max(seconds))
        axes.locator_params(axis="x", integer=True)
        legend_right(axes)


def draw_trials(path: Path, title: str, found: SearchResult, limits: LatencyTargets) -> None:
    """Both latencies over the request rate, each with its front.  Raises OSError."""
    fronts = front(found.tried)
    figures = {"trials": [_trial_figures(one, fronts[one]) for one in found.tried]}
    latencies = (
        ("TTFT", "Time to first token, p90", "ttft_p90_ms", limits.ttft_p90_ms),
        ("ITL", "Inter-token latency, p99", "itl_p99_ms", limits.itl_p99_ms),
    )
    with drawn(path, title, [3.6, 3.6], figures, shares_x=True) as rows:
        for axes, (name, words, field, limit) in zip(rows, latencies, strict=True):
            best = [one for one in found.tried if name in fronts[one]]
            axes.plot(*_points(best, field), color=GREY, drawstyle="steps-pre", label="front")
            _draw_points(axes, found.tried, field, limits)
            if found.best is not None:
                place = _points([found.best], field)
                axes.plot(*place, "o", ms=15, mfc="none", mec="black", mew=1.5, label="best")
            mark_level(axes, limit, f"limit: {limit:g} ms", color=RED)
            axes.set_title(f"{words} (hollow: a trial over a limit, or with failures)")
            axes.set_ylabel("milliseconds")
            scale_by_ratio(axes)
            legend_right(axes)
        rows[-1].set_xlabel("requests/s")


def _points(tried: Iterable[CompletedTrial], field: str) -> tuple[list[float], list[float]]:
    """Rates and latencies, by rate, without trials that did not run."""
    pairs = sorted((one.trial.rate, getattr(one.result, field)) for one in tried)
    whole = [(rate, ms) for rate, ms in pairs if math.isfinite(ms)]
    return [rate for rate, _ in whole], [ms for _, ms in whole]


def _draw_points(
    axes: "Axes", tried: Sequence[CompletedTrial], field: str, limits: LatencyTargets
) -> None:
    for name in dict.fromkeys(one.trial.sizes.scheduler for one in tried):
        color, marker = _LOOKS.get(name, (GREY, "^"))
        mine = [one for one in tried if one.trial.sizes.scheduler == name]
        for meets, fill, label in ((True, color, name), (False, "white", None)):
            points = _points((one for one in mine if one.result.meets(limits) == meets), field)
            axes.plot(*points, marker, color=color, mfc=fill, ms=7, label=label)


def _trial_figures(one: CompletedTrial, front_of: Sequence[str]) -> dict[str, Any]:
    sizes, result = one.trial.sizes, one.result
    latencies = {"ttft_p90_ms": result.ttft_p90_ms, "itl_p99_ms": result.itl_p99_ms}
    return {
        "request_rate": one.trial.rate,
        "maxBatchedTokens": sizes.max_batched_tokens,
        "maxSequences": sizes.max_sequences,
        "scheduler": sizes.scheduler,
        **{name: ms if math.isfinite(ms) else None for name, ms in latencies.items()},
        "failed": result.num_failed,
        "front_of": list(front_of),
    }
