import errno
import socket

import pytest

from pdcluster_worker.addresses import join_address, parse_address
from pdcluster_worker.transfer.sockets import describe


@pytest.mark.parametrize(
    ("address", "parts"),
    [("10.0.0.1:9100", ("10.0.0.1", 9100)), ("[fd00::1]:1", ("fd00::1", 1)), ("worker-0.pods:65535", ("worker-0.pods", 65535))],
)
def test_parse_address_is_the_inverse_of_join_address(address, parts):
    assert parse_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", "host", ":1", "[]:1", "::1:9100", "[host]:1", "h:0", "h:65536", "h:-1", "h:x", "h:²", "[::1]9"])
def test_parse_address_refuses_and_names_what_it_cannot_split(address):
    with pytest.raises(ValueError, match="address"):
        parse_address(address)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ECONNREFUSED, "x"), "connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "name or service not known"),
        (TimeoutError("no answer in 5 s"), "no answer in 5 s"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_describe_names_a_socket_error_in_words(error, words):
    assert describe(error) == words
