"""Agreement of greedy answers: pure figures over token lists, and their tables.

Answers of two sources are compared token for token up to the first difference;
what follows it is another answer and is not compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layout import cell, table

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference of two answers to one prompt.

    margin: best minus second best logit of the reference there, after what both have said
    is_top_two: both tokens are the reference's best two there
    """

    place: int
    margin: float
    is_top_two: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Answers of one source against those of another, prompt by prompt.

    num_tokens: of the answers that were expected, together
    num_equal:  of them, those before the first difference
    """

    num_answers: int
    num_tokens: int
    num_equal: int
    differences: Sequence[Difference]


Judge = Callable[[int, Tokens, int, int], tuple[float, bool]]
"""(index of the prompt, tokens that both have said, expected, actual) to (margin, is_top_two)"""


def until_end(tokens: Tokens, end: int) -> Tokens:
    """The tokens up to and with the first end-of-sequence token.

    >>> until_end([5, 6, 2, 7], 2)
    [5, 6, 2]
    >>> until_end([5, 6], 2)
    [5, 6]
    """
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def first_difference(expected: Tokens, actual: Tokens) -> int | None:
    """The first place that differs; None where there is none.

    Both end at an end-of-sequence token or at the same length, so of two equal beginnings none is
    shorter.

    >>> first_difference([1, 2, 3], [1, 2, 4])
    2
    """
    return next(
        (
            place
            for place, pair in enumerate(zip(expected, actual, strict=False))
            if pair[0] != pair[1]
        ),
        None,
    )


def agreement(expected: Sequence[Tokens], actual: Sequence[Tokens], judge: Judge) -> Agreement:
    """Compare answers to the same prompts in the same order; `judge` is asked once for each first
    difference.
    """
    differences, num_equal = [], 0
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        place = first_difference(want, got)
        num_equal += len(want) if place is None else place
        if place is not None:
            differences.append(
                Difference(place, *judge(index, want[:place], want[place], got[place]))
            )
    return Agreement(len(expected), sum(map(len, expected)), num_equal, differences)


def agreement_table(rows: Sequence[tuple[str, Agreement]]) -> str:
    """One row for each comparison."""
    header = (
        "",
        "equal answers",
        "equal tokens before the first difference",
        "margin there",
        "greatest",
        "between the best two",
    )
    return table(header, [(name, *_cells(one)) for name, one in rows])


def _cells(one: Agreement) -> tuple[str, ...]:
    num_equal = one.num_answers - len(one.differences)
    margins = [each.margin for each in one.differences]
    top_two = sum(each.is_top_two for each in one.differences)
    return (
        f"{num_equal} of {one.num_answers} ({_percent(num_equal, one.num_answers)})",
        f"{one.num_equal} of {one.num_tokens} ({_percent(one.num_equal, one.num_tokens)})",
        cell(margins).partition(" ")[0],
        f"{max(margins):.3g}" if margins else "-",
        f"{top_two} of {len(margins)}" if margins else "-",
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
