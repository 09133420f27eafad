"""Tables in plain text: aligned columns, the last one wrapped to the width of a screen."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 100
_GAP = "  "
_LEAST = 24  # of the last column, however wide the others are


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    width: int = WIDTH,
) -> list[str]:
    """right: columns aligned to the right.

    >>> print(*table(("POOL", "NOW"), [("decode/b300", "8")], right=[1]), sep="\\n")
    POOL         NOW
    decode/b300    8
    """
    cells = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    fixed = sum(widths[:-1]) + len(_GAP) * (len(header) - 1)
    widths[-1] = min(widths[-1], max(_LEAST, width - fixed))
    return [line for row in cells for line in _lines(row, widths, right)]


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> Iterator[str]:
    wrapped = textwrap.wrap(row[-1], widths[-1]) or [""]
    for number, last in enumerate(wrapped):
        shown = [*(row[:-1] if number == 0 else [""] * (len(row) - 1)), last]
        aligned = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(shown, widths, strict=True))
        ]
        yield _GAP.join(aligned).rstrip()
