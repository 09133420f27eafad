import errno
import socket

import pytest

from pdcluster_worker.kv_transfer.sockets import describe


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
