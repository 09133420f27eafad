"""Groups of bars as an SVG picture, by itself.  Pure; needs no plot library."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 620, 240, 60, 60, 60
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#7f7f7f")
_TICKS = 5
_GROUP_SHARE = 0.8
"""Share of a group's place that its bars take."""


def bars(title: str, y: str, groups: Sequence[str], values: Mapping[str, Sequence[float]]) -> str:
    """The whole file: for each group one bar of each name, its value above it.

    y: of the upright axis, which begins at 0.  values: by name, one for each group
    """
    most = max((value for row in values.values() for value in row), default=0.0) or 1.0
    size = f'width="{_LEFT + _WIDTH + 20}" height="{_TOP + _HEIGHT + _BELOW}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 18, title, "start"),
        _text(_LEFT, 38, y, "start"),
        *_axes(most),
    ]
    for number, group in enumerate(groups):
        left = _LEFT + _WIDTH * number / len(groups)
        lines.append(_text(left + _WIDTH / len(groups) / 2, _TOP + _HEIGHT + 18, group))
        heights = {name: row[number] for name, row in values.items()}
        lines += _group(left, _WIDTH / len(groups), heights, most)
    lines += _legend(list(values))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _group(left: float, width: float, heights: Mapping[str, float], most: float) -> list[str]:
    lines: list[str] = []
    bar = width * _GROUP_SHARE / len(heights)
    for number, value in enumerate(heights.values()):
        x = left + width * (1 - _GROUP_SHARE) / 2 + number * bar
        height = _HEIGHT * value / most
        top = _TOP + _HEIGHT - height
        place = f'x="{x:.1f}" y="{top:.1f}" width="{0.9 * bar:.1f}" height="{height:.1f}"'
        lines.append(f'<rect {place} fill="{_COLORS[number % len(_COLORS)]}"/>')
        lines.append(_text(x + 0.45 * bar, top - 4, f"{value:.3g}"))
    return lines


def _axes(most: float) -> list[str]:
    bottom = _TOP + _HEIGHT
    path = f"{_LEFT},{_TOP} {_LEFT},{bottom} {_LEFT + _WIDTH},{bottom}"
    lines = [f'<polyline points="{path}" fill="none" stroke="black"/>']
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        lines.append(_text(_LEFT - 6, bottom - _HEIGHT * share + 4, f"{most * share:.2g}", "end"))
    return lines


def _legend(names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for number, name in enumerate(names):
        x, y = _LEFT + _WIDTH * number / len(names), _TOP + _HEIGHT + 34
        color = _COLORS[number % len(_COLORS)]
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="10" height="10" fill="{color}"/>')
        lines.append(_text(x + 14, y + 9, name, "start"))
    return lines


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
