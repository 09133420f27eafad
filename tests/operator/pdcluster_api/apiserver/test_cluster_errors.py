"""From the API server's answer to an error, and from an error to its message.

The messages are kube-apiserver's own.
"""

import json

import pytest

from pdcluster_api.apiserver import errors
from pdcluster_api.apiserver.errors import ClusterError, error_of, failure_of
from pdcluster_schema import conditions


def answer(code: int, message: str, reason: str = "") -> ClusterError:
    return error_of(
        code, json.dumps({"kind": "Status", "message": message, "reason": reason}).encode(), {}
    )


@pytest.mark.parametrize(
    ("code", "message", "expected", "reason"),
    [
        (
            403,
            'services is forbidden: User "system:a" cannot create resource "services" in API group '
            '"" in the namespace "x"',
            errors.ForbiddenError,
            conditions.FORBIDDEN,
        ),
        (401, "Unauthorized", errors.ForbiddenError, conditions.FORBIDDEN),
        (
            403,
            'services "chat" is forbidden: exceeded quota: small, requested: services=1, used: '
            "services=0, limited: services=0",
            errors.QuotaExceededError,
            conditions.QUOTA_EXCEEDED,
        ),
        (
            403,
            'pods "x" is forbidden: violates PodSecurity "restricted:latest"',
            errors.RefusedError,
            conditions.APPLY_FAILED,
        ),
        (
            403,
            'admission webhook "x.example" denied the request: you cannot do this',
            errors.RefusedError,
            conditions.APPLY_FAILED,
        ),
        (
            500,
            'Internal error occurred: failed calling webhook "x.example": no endpoints',
            errors.RefusedError,
            conditions.APPLY_FAILED,
        ),
        (
            500,
            "failed to create typed patch object (a/b): .spec.x: field not declared in schema",
            errors.RefusedError,
            "ApplyFailed",
        ),
        (
            422,
            'StatefulSet.apps "x" is invalid: spec: Forbidden: updates',
            errors.RefusedError,
            conditions.APPLY_FAILED,
        ),
        (
            422,
            'Service "chat" is invalid: metadata.uid: Invalid value: "abc": field is immutable',
            errors.ConflictError,
            "ApplyFailed",
        ),
        (
            422,
            "the server rejected our request due to an error in our request",
            errors.ConflictError,
            "ApplyFailed",
        ),
        (
            422,
            "Secret x is invalid: data: Forbidden: field is immutable when `immutable` is set",
            errors.ImmutableError,
            "ApplyFailed",
        ),
        (
            409,
            "Operation cannot be fulfilled on services",
            errors.ConflictError,
            conditions.APPLY_FAILED,
        ),
        (404, 'services "chat" not found', errors.NotFoundError, conditions.APPLY_FAILED),
        (
            410,
            "The provided continue parameter is too old",
            errors.GoneError,
            conditions.APPLY_FAILED,
        ),
        (429, "too many requests", errors.UnavailableError, conditions.APPLY_FAILED),
        (500, "etcdserver: request timed out", errors.UnavailableError, conditions.APPLY_FAILED),
        (503, "apiserver not ready", errors.UnavailableError, conditions.APPLY_FAILED),
    ],
)
def test_error_of_an_answer(code: int, message: str, expected: type[ClusterError], reason: str):
    error = answer(code, message)
    assert type(error) is expected
    assert (str(error), error.code) == (message, code)
    assert failure_of(error, "Service chat").reason == reason


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
