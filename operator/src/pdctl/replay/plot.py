"""A replay as a picture; needs matplotlib of the extra `replay`, imported when one is drawn."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pdcluster_api.errors import StartError
from pdcluster_schema.autoscale import AutoscaleSpec
from pdctl.replay.report import ROLES
from pdctl.replay.run import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"prefill": "tab:blue", "decode": "tab:orange"}
_DOTS_PER_INCH = 80
_COLORS_OF_FILE = 128  # lines and a few shades of them: half of the bytes that all colours take
_LONG_HOURS = 3.0


def require_matplotlib() -> None:
    """Raises StartError (exit code 1) when it is not installed."""
    if find_spec("matplotlib") is None:
        message = "plots need matplotlib: pip install matplotlib, or go without with --no-plot"
        raise StartError(message, exit_code=1)


def draw(moments: Sequence[Moment], spec: AutoscaleSpec, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(10.0, 11.0), dpi=_DOTS_PER_INCH, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title)
    rows: list[Axes] = list(
        figure.subplots(5, 1, sharex=True, height_ratios=[1.0, 1.0, 1.0, 1.3, 1.3])
    )
    is_long = moments[-1].load.seconds > _LONG_HOURS * 3600.0
    at = [moment.load.seconds / (3600.0 if is_long else 60.0) for moment in moments]
    _draw_demand(rows[0], at, moments)
    _draw_queues(rows[1], at, moments, spec)
    _draw_signals(rows[2], at, moments, spec)
    for axes, role in zip(rows[3:], ROLES, strict=True):
        _draw_workers(axes, at, moments, role)
    for axes in rows:
        axes.grid(alpha=0.3)
        axes.set_xlim(at[0], at[-1])
        axes.set_ylim(0.0, 1.25 * max(axes.get_ylim()[1], 1e-6))  # room for the legend
    rows[-1].set_xlabel("hours" if is_long else "minutes")
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = canvas.buffer_rgba()  # type: ignore[no-untyped-call]
    image = Image.frombuffer("RGBA", canvas.get_width_height(), pixels, "raw", "RGBA", 0, 1)
    image.convert("RGB").quantize(_COLORS_OF_FILE, kmeans=1).save(path, optimize=True)


def _draw_demand(axes: "Axes", at: Sequence[float], moments: Sequence[Moment]) -> None:
    loads = [moment.load for moment in moments]
    prompts = [load.requests_per_second * load.input_tokens / 1000.0 for load in loads]
    answers = [load.requests_per_second * load.output_tokens / 1000.0 for load in loads]
    axes.plot(at, prompts, color=_COLORS["prefill"], label="prompt")
    axes.plot(at, answers, color=_COLORS["decode"], label="answer")
    _title(axes, "1000 tokens/s\nthat arrive")


def _draw_queues(
    axes: "Axes", at: Sequence[float], moments: Sequence[Moment], spec: AutoscaleSpec
) -> None:
    prefill = [moment.prefill_queue_requests for moment in moments]
    decode = [moment.num_requests_waiting for moment in moments]
    axes.plot(at, prefill, color=_COLORS["prefill"], label="prefill queue")
    axes.plot(at, decode, color=_COLORS["decode"], label="waiting for decode")
    _thresholds(axes, "prefill", spec.prefill.queue_up)
    _thresholds(axes, "decode", spec.decode.queue_up)
    _title(axes, "requests\nthat wait")


def _draw_signals(
    axes: "Axes", at: Sequence[float], moments: Sequence[Moment], spec: AutoscaleSpec
) -> None:
    busy = [moment.engine_busy_ratio for moment in moments]
    usage = [moment.kv_cache_usage_ratio for moment in moments]
    axes.plot(at, busy, color=_COLORS["prefill"], linewidth=1.0, label="prefill utilization")
    axes.plot(at, usage, color=_COLORS["decode"], linewidth=1.0, label="decode KV usage")
    _thresholds(axes, "prefill", spec.prefill.utilization_down, spec.prefill.utilization_up)
    _thresholds(axes, "decode", spec.decode.kv_usage_down, spec.decode.kv_usage_up)
    _title(axes, "share\n(dotted: thresholds)")


def _thresholds(axes: "Axes", role: str, *values: float) -> None:
    for value in values:
        axes.axhline(value, color=_COLORS[role], linestyle=":", linewidth=1.0)


def _title(axes: "Axes", label: str, columns: int = 2) -> None:
    axes.set_ylabel(label)
    axes.legend(loc="upper right", fontsize="small", ncols=columns)


def _draw_workers(axes: "Axes", at: Sequence[float], moments: Sequence[Moment], role: str) -> None:
    pools = [[pool for pool in moment.pools.values() if pool.role == role] for moment in moments]
    replicas = [sum(pool.replicas for pool in each) for each in pools]
    ready = [sum(pool.ready for pool in each) for each in pools]
    ends = [sum(pool.ready + pool.draining for pool in each) for each in pools]
    axes.fill_between(at, ready, step="post", color=_COLORS[role], alpha=0.25, label="ready")
    axes.fill_between(
        at, ready, ends, step="post", color="tab:red", linewidth=0.0, label="draining"
    )
    axes.step(at, replicas, where="post", color=_COLORS[role], label="asked for")
    demand = [moment.demand[role] for moment in moments]
    axes.plot(at, demand, color="black", linestyle="--", linewidth=1.0, label="busy by the load")
    axes.locator_params(axis="y", integer=True)
    _title(axes, f"{role} workers", columns=4)
