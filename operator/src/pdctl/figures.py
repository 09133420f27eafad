"""The style of every plot: light background, grid, colours that colour-blind readers can tell
apart, marked percentiles and objectives; and the plotted figures as JSON beside the picture.

matplotlib, of the extra `plot`, is imported when a picture is drawn.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdcluster_api.errors import StartError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#555555"
"""Colours of Okabe and Ito's palette, and a grey."""
_CYCLE = [BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9", "black"]
PERCENTILES = {50: ":", 90: "--", 99: "-."}

_PANEL_INCHES = 3.0
_INCHES_WIDE, _INCHES_MARGIN = 10.0, 1.0
_COLORS_OF_FILE = 128  # lines and a few shades of them: half of the bytes that all colours take
_STYLE: Any = {
    "font.size": 10.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.prop_cycle": f"cycler('color', {_CYCLE})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 90,
    "figure.titlesize": 13.0,
    "figure.titleweight": "bold",
    "grid.color": "#dddddd",
    "legend.fontsize": 9.0,
    "legend.framealpha": 0.9,
    "savefig.dpi": "figure",
    "svg.fonttype": "none",
    "svg.hashsalt": "pdcluster",
}


def require_matplotlib(fix: str) -> None:
    """Raises StartError (exit code 1) when it is not installed."""
    if find_spec("matplotlib") is None:
        raise StartError(f"plots need matplotlib: pip install matplotlib, or {fix}", exit_code=1)


def check_name(path: Path) -> None:
    """Raises StartError (exit code 2) for a file that is no picture."""
    if path.suffix not in (".png", ".svg"):
        message = f"--plot: {path} is no picture; give a name that ends with .png or .svg"
        raise StartError(message, exit_code=2)


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """x, y: titles of the axes, which begin at 0."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]


def distribution(name: str, values: Sequence[float]) -> Curve:
    """Cumulative distribution of the values, in per cent.

    >>> distribution("TTFT", [3.0, 1.0]).points
    [(1.0, 50.0), (3.0, 100.0)]
    """
    ordered = sorted(values)
    return Curve(name, [(value, 100 * (n + 1) / len(ordered)) for n, value in enumerate(ordered)])


def draw_curves(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Raises OSError."""
    figures = {
        panel.title: {curve.name: list(curve.points) for curve in panel.curves} for panel in panels
    }
    with drawn(path, title, [_PANEL_INCHES] * len(panels), figures) as rows:
        for axes, panel in zip(rows, panels, strict=True):
            for curve in panel.curves:
                axes.plot(*zip(*curve.points, strict=True), label=curve.name)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            legend_right(axes)


@contextmanager
def drawn(
    path: Path,
    title: str,
    heights: Sequence[float],
    figures: Mapping[str, Any],
    *,
    shares_x: bool = False,
) -> Iterator[Sequence["Axes"]]:
    """Panels below each other, of so many inches each, that the block draws on.

    The picture is written at its end, and the figures to a file of that name and `.json`.
    Raises OSError.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(_INCHES_WIDE, sum(heights) + _INCHES_MARGIN), layout="constrained")
        figure.suptitle(title)
        figure.subplots(len(heights), 1, sharex=shares_x, squeeze=False, height_ratios=heights)
        yield figure.axes
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            figure.savefig(path, metadata={"Date": None})
        else:
            _save_small(figure, path)
    figures_path(path).write_text(json.dumps({"title": title, **figures}) + "\n")


def figures_path(path: Path) -> Path:
    """The file with a picture's figures."""
    return path.with_name(f"{path.name}.json")


def mark(axes: "Axes", value: float, label: str, *, color: str = GREY, line: str = "-") -> None:
    """A vertical line, named in the legend."""
    axes.axvline(value, color=color, linestyle=line, linewidth=1.3, label=label)


def mark_level(
    axes: "Axes", value: float, label: str, *, color: str = GREY, line: str = "-"
) -> None:
    """A horizontal line, named in the legend."""
    axes.axhline(value, color=color, linestyle=line, linewidth=1.3, label=label)


def legend_right(axes: "Axes") -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def scale_by_ratio(axes: "Axes") -> None:
    """A logarithmic axis with plain numbers: an objective is seen beside values far over it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 50 * low else (1.0,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def short(value: float) -> str:
    """
    >>> short(1493.2), short(34.71), short(0.0312)
    ('1493', '34.7', '0.0312')
    """
    return f"{value:.0f}" if value >= 100.0 else f"{value:.3g}"


def _save_small(figure: "Figure", path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call] # matplotlib has no types for it
    pixels = canvas.buffer_rgba()  # type: ignore[no-untyped-call] # as above
    image = Image.frombuffer("RGBA", canvas.get_width_height(), pixels, "raw", "RGBA", 0, 1)
    image.convert("RGB").quantize(_COLORS_OF_FILE, kmeans=1).save(path, "PNG", optimize=True)
