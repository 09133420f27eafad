"""Curves as an SVG picture without a plotting library: panels below each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 560, 180, 70, 40, 60
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Both axes begin at 0.  x: title of the lower one."""

    title: str
    x: str
    curves: Sequence[Curve]


def distribution(name: str, values: Sequence[float]) -> Curve:
    """Cumulative distribution of the values.

    >>> distribution("TTFT", [3.0, 1.0]).points
    [(1.0, 0.5), (3.0, 1.0)]
    """
    ordered = sorted(values)
    return Curve(name, [(value, (index + 1) / len(ordered)) for index, value in enumerate(ordered)])


def picture(title: str, panels: Sequence[Panel]) -> str:
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [_panel(panel, _TOP + index * (_HEIGHT + _GAP)) for index, panel in enumerate(panels)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 30}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, background, _text(_LEFT, 18, title), *parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: float) -> str:
    points = [point for curve in panel.curves for point in curve.points]
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = max((y for _, y in points), default=0.0) or 1.0
    bottom = top + _HEIGHT

    def at(x: float, y: float) -> str:
        return f"{_LEFT + _WIDTH * x / most_x:.1f},{bottom - _HEIGHT * y / most_y:.1f}"

    lines = [_text(_LEFT, top - 6, panel.title), _axes(top, bottom)]
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        lines.append(_text(_LEFT + _WIDTH * share, bottom + 15, f"{most_x * share:.3g}", "middle"))
        label = f"{most_y * share:.3g}"
        lines.append(_text(_LEFT - 6, bottom - _HEIGHT * share + 4, label, "end"))
    lines.append(_text(_LEFT + _WIDTH / 2, bottom + 30, panel.x, "middle"))
    for number, curve in enumerate(panel.curves):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(at(x, y) for x, y in curve.points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        place = (_LEFT + _WIDTH - 4, bottom - 8 - 14 * number)
        lines.append(_text(*place, curve.name, "end", color))
    return "\n".join(lines)


def _axes(top: float, bottom: float) -> str:
    path = f"{_LEFT},{top} {_LEFT},{bottom} {_LEFT + _WIDTH},{bottom}"
    return f'<polyline points="{path}" fill="none" stroke="black"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"'
    return f"<text {place}>{escape(text)}</text>"
