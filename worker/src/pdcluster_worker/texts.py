"""Text from elsewhere in our messages: cut to a length that a message bears, with a sign that it
was cut.
"""

MAX_QUOTED = 100
MAX_LINE = 300


def cut(text: str, max_characters: int) -> str:
    """Return the text, or its beginning with "..." where it is longer.

    >>> cut("four", 4), cut("four more", 4)
    ('four', 'f...')
    """
    return text if len(text) <= max_characters else text[: max_characters - 3] + "..."


def quoted(value: object) -> str:
    """Name a value that a client gave, in quotes.

    >>> quoted("model")
    "'model'"
    """
    return cut(repr(value), MAX_QUOTED)


def one_line(error: object) -> str:
    """Return an error's text on one line, for a log line or the message of another error.

    >>> one_line("first\\n  second")
    'first second'
    """
    return cut(" ".join(str(error).split()), MAX_LINE)
