"""Text from elsewhere in our messages."""

import doctest

import pytest

from pdcluster_worker import texts


def test_examples() -> None:
    failed, attempted = doctest.testmod(texts)
    assert (failed, attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("length", "shown"), [(texts.MAX_QUOTED - 2, "x'"), (texts.MAX_QUOTED - 1, "...")]
)
def test_quoted_value_shows_that_it_is_cut(length: int, shown: str) -> None:
    text = texts.quoted("x" * length)
    assert (len(text), text.endswith(shown)) == (texts.MAX_QUOTED, True)
