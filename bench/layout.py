"""Layout of figures in a report: cells with their spread, and Markdown tables.

It knows no system.
"""

from collections.abc import Iterable, Sequence

from stats import spread


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with its columns aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    return "\n".join(
        [texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]]
    )


def cell(values: Sequence[float]) -> str:
    """The median and, over several rounds, the spread; "-" without a value."""
    if not values:
        return "-"
    figure = spread(values)
    middle, low, high = (_number(value) for value in (figure.median, figure.low, figure.high))
    return middle if len(values) == 1 else f"{middle} [{low} - {high}]"


def _number(value: float) -> str:
    """Three significant digits, and never an exponent for what is large."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
