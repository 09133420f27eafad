"""Streamed stop handling against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_worker.server.generation.choice import StopStrings

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def search(text: str, stops: list[str], *, include: bool) -> tuple[str, bool]:
    """The match that ends first; of those that end together, the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    end, start = min(found)
    return text[: end if include else start], True


def stream(pieces: list[str], stops: list[str], *, include: bool) -> tuple[str, bool]:
    matcher = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_streaming_equals_a_search_of_the_whole_text(pieces, stops, include):
    assert stream(pieces, stops, include=include) == search("".join(pieces), stops, include=include)


@given(text=LETTERS, stops=STOPS)
def test_nothing_is_held_that_cannot_become_a_stop_string(text, stops):
    matcher = StopStrings(stops)
    shown, stopped = matcher.feed(text)
    held = text[len(shown) :]

    assert stopped or held == "" or any(stop.startswith(held) for stop in stops)


def test_text_is_held_while_it_may_become_a_stop_string():
    matcher = StopStrings(["<end>"])

    assert [matcher.feed(piece) for piece in ("a<", "e", "x", "<en", "d>tail")] == [
        ("a", False),
        ("", False),
        ("<ex", False),
        ("", False),
        ("", True),
    ]
