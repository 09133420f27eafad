"""From the API server's answer to an error; their messages are in tests/golden/operator."""

import pytest

from pdcluster_api.apiserver import errors
from pdcluster_api.apiserver.errors import ClusterError, error_of, failure_of
from pdcluster_schema import conditions


@pytest.mark.parametrize(
    "body", [b"", b"<html>502 Bad Gateway</html>", b"[]", b'{"kind": "Status"}']
)
def test_error_of_an_answer_that_says_nothing(body: bytes):
    assert str(error_of(502, body, {})) == "the API server answered 502"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3", 3.0), ("-1", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), (None, None)],
)
def test_error_of_an_answer_carries_retry_after(value: str | None, expected: float | None):
    assert (
        error_of(429, b"", {} if value is None else {"Retry-After": value}).retry_after == expected
    )


def test_failure_says_what_to_do():
    failure = failure_of(
        errors.NameTakenError("Service chat exists and does not belong to this PDCluster"),
        "Service chat",
    )
    assert failure.object == "Service chat"
    assert failure.reason == conditions.NAME_TAKEN
    assert failure.message.endswith("; delete it, or give the PDCluster another name")


def test_failure_of_every_error_has_a_known_reason():
    pending = [ClusterError]
    for kind in pending:
        pending += kind.__subclasses__()
        assert failure_of(kind("x"), "y").reason in conditions.NEEDS_ACTION
