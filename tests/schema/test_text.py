"""Text of a limited length: never longer than the limit, and whole where it fits."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema import text as texts
from pdcluster_schema.text import DOTS, one_line, quoted, shortened, shortened_bytes


@given(st.text(), st.integers(3, 40))
def test_a_text_is_whole_where_it_fits_and_else_its_beginning_with_dots(
    text: str, most: int
) -> None:
    found = shortened(text, most)

    assert found == text if len(text) <= most else len(found) == most
    assert found == text or (found.endswith(DOTS) and text.startswith(found.removesuffix(DOTS)))


@given(st.text(), st.integers(3, 40))
def test_bytes_count_and_no_character_is_cut_in_two(text: str, most: int) -> None:
    found = shortened_bytes(text, most)

    assert len(found.encode()) <= most
    assert found == text or (found.endswith(DOTS) and text.startswith(found.removesuffix(DOTS)))


@pytest.mark.parametrize(
    ("text", "line"), [(" two\n\tlines ", "two lines"), ("x" * 20, "x" * 7 + DOTS), ("", "")]
)
def test_one_line_is_without_breaks_and_short(text: str, line: str) -> None:
    assert one_line(text, 10) == line


def test_examples() -> None:
    failed, attempted = doctest.testmod(texts)
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("length", "shown"), [(texts.MAX_QUOTED - 2, "x'"), (texts.MAX_QUOTED - 1, "...")]
)
def test_quoted_value_shows_that_it_is_cut(length: int, shown: str) -> None:
    text = quoted("x" * length)
    assert (len(text), text.endswith(shown)) == (texts.MAX_QUOTED, True)
