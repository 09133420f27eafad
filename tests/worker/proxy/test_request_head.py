"""Heads that are relayed, as the worker gets them, and those that are not: every form in which two
readers might see two requests.
"""

import pytest

from pdcluster_worker.proxy.request_head import PATHS, RequestHead

CHAT = b"/v1/chat/completions"


def head(*upstreams: bytes, upstream: bytes = b"POST " + CHAT + b" HTTP/1.1") -> bytes:
    return b"\r\n".join([upstream, b"Host: api", *upstreams, b"", b""])


LENGTH = b"Content-Length: 2"


def test_worker_gets_the_fields_but_those_of_the_hop() -> None:
    found = RequestHead()
    upstreams = (
        LENGTH,
        b"connection: keep-alive",
        b"Keep-Alive: timeout=5",
        b"TE: trailers",
        b"Proxy-Authorization: Basic x",
        b"X-Request-Id: mine",
        b"traceparent: 00-1-2-01",
        b"X-PDCluster-Route: 1",
        b"Authorization: Bearer k",
        b"X-Forwarded-For: 10.0.0.1",
        b"X-Forwarded-For: 10.0.0.2",
        b"X-Forwarded-Proto: https",
    )

    assert found.read(head(*upstreams), 16, None) is None
    assert found.forwarded(b"10.0.0.3").split(b"\r\n") == [
        b"POST " + CHAT + b" HTTP/1.1",
        b"Host: api",
        b"X-Request-Id: mine",
        b"traceparent: 00-1-2-01",
        b"X-PDCluster-Route: 1",
        b"Authorization: Bearer k",
        b"X-Forwarded-Proto: https",
        b"x-forwarded-for: 10.0.0.1, 10.0.0.2, 10.0.0.3",
        b"content-length: 2",
        b"",
        b"",
    ]
    assert (found.length, found.closes) == (2, False)


def test_an_empty_list_of_proxies_names_none() -> None:
    found = RequestHead()
    assert found.read(head(LENGTH, b"X-Forwarded-For:"), 16, None) is None

    assert b"\r\nx-forwarded-for: 10.0.0.3\r\n" in found.forwarded(b"10.0.0.3")


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_known_path_is_relayed(path: bytes) -> None:
    request = head(LENGTH, upstream=b"POST " + path + b" HTTP/1.1")
    assert RequestHead().read(request, 16, None) is None


@pytest.mark.parametrize(
    "request_",
    [
        head(LENGTH, LENGTH),
        head(LENGTH, b"Content-Length: 3"),
        head(b"Content-Length: 2, 2"),
        head(b"Content-Length: +2"),
        head(b"Content-Length: 0x2"),
        head(b"Content-Length: 99999999999999999999"),
        head(b"Content-Length : 2"),
        head(b"Content-Length: 0"),
        head(),
        head(LENGTH, b"Transfer-Encoding: chunked"),
        head(b"Transfer-Encoding: chunked", LENGTH),
        head(b"Transfer-Encoding: chunked"),
        head(b"Transfer-Encoding: xchunked", LENGTH),
        head(b"X: a", b" folded", LENGTH),
        head(b"X: a\tb", b"\tfolded", LENGTH),
        head(b"X: a\nContent-Length: 3", LENGTH),
        head(b"X: a\rContent-Length: 3", LENGTH),
        head(b"X: a\0b", LENGTH),
        head(b": nameless", LENGTH),
        head(b"Host: other", LENGTH),
        b"POST " + CHAT + b" HTTP/1.1\r\nContent-Length: 2\r\n\r\n",
        head(b"Expect: 100-continue", LENGTH),
        head(b"Upgrade: h2c", b"Connection: Upgrade", LENGTH),
        head(b"Upgrade: h2c", LENGTH),
        head(b"Connection: X-Api-Key", b"X-Api-Key: k", LENGTH),
        head(b"Connection: close, TE", LENGTH),
        head(b"Trailer: X", LENGTH),
        head(LENGTH, upstream=b"POST " + CHAT + b" HTTP/1.0"),
        head(LENGTH, upstream=b"POST " + CHAT + b" HTTP/2.0"),
        head(LENGTH, upstream=b"POST " + CHAT),
    ],
)
def test_a_form_that_is_not_plain_is_not_relayed(request_: bytes) -> None:
    assert RequestHead().read(request_, 16, None) == "form"


@pytest.mark.parametrize(
    "target",
    [
        b"http://worker:8000" + CHAT,
        b"//worker" + CHAT,
        CHAT + b"/",
        CHAT + b"?a=1",
        CHAT + b"#x",
        b"/v1/%63hat/completions",
        b"/v1/../v1/chat/completions",
        b"/v1/responses",
        b"/metrics",
        b"/debug/requests/1",
        b"/v1/chat/completions\xff",
    ],
)
def test_a_target_that_is_no_known_path_is_not_relayed(target: bytes) -> None:
    request = head(LENGTH, upstream=b"POST " + target + b" HTTP/1.1")
    assert RequestHead().read(request, 16, None) in ("route", "form")


def test_fields_are_counted_and_keys_asked_for() -> None:
    found, many = RequestHead(), [b"X%d: y" % number for number in range(15)]

    def has_key(authorization: bytes, api_key: bytes) -> bool:
        return (authorization, api_key) in ((b"Bearer k", b""), (b"", b"k"))

    assert found.read(head(LENGTH, *many), 16, None) == "size"
    assert RequestHead().read(head(LENGTH), 16, has_key) == "key"
    assert RequestHead().read(head(LENGTH, b"x-api-key: k"), 16, has_key) is None
    twice = (b"authorization: Bearer k", b"authorization: Bearer other")
    assert RequestHead().read(head(LENGTH, *twice), 16, has_key) is None


def test_the_parser_and_the_length_see_the_same_end() -> None:
    found = RequestHead()
    assert found.read(head(LENGTH, b"Connection: close"), 16, None) is None
    assert found.closes
    assert found.take_body(b"{")
    assert not found.is_whole
    assert found.take_body(b"}")
    assert found.is_whole
    assert not found.take_body(b"more")
