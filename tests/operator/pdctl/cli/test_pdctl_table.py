"""Tables of pdctl: aligned, and no wider than a screen."""

import doctest

from pdctl.cli import table as module
from pdctl.cli.table import WIDTH, table


def test_examples_hold():
    assert doctest.testmod(module) == (0, 1)


def test_the_last_column_is_wrapped_below_itself():
    lines = table(("RULE", "WHY"), [("need", "word " * 40), ("result", "x")])

    assert max(len(line) for line in lines) <= WIDTH
    assert [line[:8] for line in lines] == [
        "RULE    ",
        "need    ",
        "        ",
        "        ",
        "result  ",
    ]
    assert "".join(line[8:] + " " for line in lines[1:4]).split() == ["word"] * 40


def test_an_empty_cell_keeps_its_line():
    assert table(("A", "B"), [("x", "")]) == ["A  B", "x"]
