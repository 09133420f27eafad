"""Text of a limited length."""

DOTS = "..."
MAX_QUOTED = 100
MAX_LINE = 300


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and dots; at most so many characters.

    >>> shortened("a long sentence", 9)
    'a long...'
    """
    return text if len(text) <= most else text[: most - len(DOTS)] + DOTS


def shortened_bytes(text: str, most: int) -> str:
    """As `shortened`, at most so many bytes of UTF-8; no character is cut in two."""
    encoded = text.encode()
    return (
        text if len(encoded) <= most else encoded[: most - len(DOTS)].decode(errors="ignore") + DOTS
    )


def one_line(value: object, most: int = MAX_LINE) -> str:
    """The text of an error or another value in one line, shortened.

    >>> one_line("  two\\n lines", 40)
    'two lines'
    """
    return shortened(" ".join(str(value).split()), most)


def quoted(value: object) -> str:
    """A value from elsewhere, in quotes.

    >>> quoted("model")
    "'model'"
    """
    return shortened(repr(value), MAX_QUOTED)


def and_more(number: int, what: str = "") -> str:
    """Others than the first of so many, as text.

    >>> and_more(1), and_more(3, " pairs")
    ('', ' (and 2 more pairs)')
    """
    return f" (and {number - 1} more{what})" if number > 1 else ""
