"""Text of a limited length, and addresses as they are written."""

DOTS = "..."


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


def one_line(text: str, most: int) -> str:
    """The text in one line, shortened.

    >>> one_line("  two\\n lines", 40)
    'two lines'
    """
    return shortened(" ".join(text.split()), most)


def address_of(host: str, port: int) -> str:
    """`host:port`, as an address is written.

    >>> address_of("10.0.0.1", 8000), address_of("fd00::1", 8000)
    ('10.0.0.1:8000', '[fd00::1]:8000')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
