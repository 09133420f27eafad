"""A request that offers another protocol, as the JDK's HTTP client offers HTTP/2 with its first
one.

RFC 9110 lets a server pass the offer over.  The parser stops behind such a
header and takes the body for the other protocol, so the header is written
again without the offer, for a new parser.
"""

from collections.abc import Iterable

_OFFER = (b"upgrade", b"http2-settings")


def without_offer(
    request_line: tuple[bytes, bytes, str], headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    r"""The header of a request, less what offers another protocol.

    request_line: method, target and the version's number
    headers:      names in lower case, and values

    >>> without_offer((b"GET", b"/", "1.1"), [(b"upgrade", b"h2c"), (b"connection",
    ...     b"Upgrade, close")])
    b'GET / HTTP/1.1\r\nconnection: close\r\n\r\n'
    """
    method, target, version = request_line
    lines = [b"%s %s HTTP/%s" % (method, target, version.encode())]
    for name, value in headers:
        if name == b"connection":
            tokens = (token.strip() for token in value.split(b","))
            value = b", ".join(token for token in tokens if token.lower() not in _OFFER)
        if name not in _OFFER and value:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"\r\n"])
