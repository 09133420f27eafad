"""Text of a limited length: never longer than the limit, and whole where it fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_api.text import DOTS, one_line, shortened, shortened_bytes


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
