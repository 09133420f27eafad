"""Errors of requests to the API server, and the text and fix of each.

ClusterError                 (an OperatorError); `code` is the HTTP status, 0 = there was no answer
├── NotFoundError            404: no such object, or no such kind
├── MissingKindError         the same where an object of an optional kind is to be made
├── GoneError                410: a list's continuation, or a watch's start, is too old
├── ConflictError            409: the object was changed, exists already, or is another of that name
│   └── UnsettledError   an object changes faster than it can be written (found by us)
├── UnavailableError         no answer, 429, 500 to 504 of the server itself: try again later
├── UnmadeServiceError       the same where a Service is to be made, which stops nothing else
├── ForbiddenError           401, 403: the operator has no right to do it
├── QuotaExceededError       403 of a ResourceQuota
├── NameTakenError           an object of that name has another owner (found by us, not the server)
└── RefusedError             400, 422 and the rest: validation, an admission webhook, a policy
    └── ImmutableError       the object was made immutable
"""

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pdcluster_api.errors import OperatorError
from pdcluster_api.plan.observed.state import WriteFailure
from pdcluster_schema import conditions

# Words of refusals that come with any status; the last one, an unknown field in an apply, even with
# 500
_REFUSALS = (
    "admission webhook",
    "failed calling webhook",
    "ValidatingAdmissionPolicy",
    "failed to create typed patch object",
)

# The whole answer to a JSON patch whose `test` fails; a fault of an object is always named
_FAILED_TEST = "the server rejected our request due to an error in our request"

_IMMUTABLE = "field is immutable when `immutable` is set"


class ClusterError(OperatorError):
    """Root of the tree.  retry_after: seconds that the server asked for, if it did."""

    reason: ClassVar[str] = conditions.APPLY_FAILED
    fix: ClassVar[str] = ""

    def __init__(self, message: str, *, code: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class NotFoundError(ClusterError):
    """The object or kind does not exist."""


class GoneError(ClusterError):
    """The start of a list or a watch is no longer kept; start again."""


class ConflictError(ClusterError):
    """The object is another than expected; read it and decide again."""


class UnsettledError(ConflictError):
    """Objects that kept changing, after everything else was done.  failures: refused writes."""

    def __init__(self, message: str, failures: Sequence[WriteFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class UnavailableError(ClusterError):
    """The API server cannot be reached or is overloaded."""


class UnmadeServiceError(ClusterError):
    fix = "it is tried again; if it stays so, look for an admission webhook for Services that hangs"


class ForbiddenError(ClusterError):
    reason = conditions.FORBIDDEN
    fix = (
        "give it to the operator's ServiceAccount (the chart's ClusterRole lists every right that "
        "it needs)"
    )


class QuotaExceededError(ClusterError):
    reason = conditions.QUOTA_EXCEEDED
    fix = "raise the ResourceQuota or free some of it"


class NameTakenError(ClusterError):
    reason = conditions.NAME_TAKEN
    fix = "delete it, or give the PDCluster another name"


class RefusedError(ClusterError):
    fix = "correct the field that is named; what a podTemplate says goes into the pods as it is"


class MissingKindError(ClusterError):
    """The message says which field asks for the kind."""


class ImmutableError(RefusedError):
    fix = (
        "it has `immutable` set, which cannot be undone: delete the object, and the operator "
        "creates it again without"
    )


def failure_of(error: ClusterError, what: str) -> WriteFailure:
    message = f"{error}; {error.fix}" if error.fix else str(error)
    return WriteFailure(object=what, reason=error.reason, message=message)


def error_of(code: int, body: bytes, headers: Mapping[str, str]) -> ClusterError:
    """Error of an answer whose status is not 2xx."""
    try:
        status = json.loads(body)
    except ValueError:  # as a proxy's page
        status = {}
    status = status if isinstance(status, dict) else {}
    message = str(status.get("message") or f"the API server answered {code}")
    is_timeout = status.get("reason") == "ServerTimeout"
    by_code = UnavailableError if is_timeout else _CLASSES.get(code, RefusedError)
    kind = _class_of(code, message) or by_code
    return kind(message, code=code, retry_after=_seconds(headers.get("Retry-After")))


def _class_of(code: int, message: str) -> type[ClusterError] | None:
    """By the message; None = the status alone says it."""
    if any(word in message for word in _REFUSALS):
        return RefusedError
    if _IMMUTABLE in message:
        return ImmutableError
    if code == 422 and ("metadata.uid" in message or message == _FAILED_TEST):
        return ConflictError
    if code not in (401, 403):
        return None
    if "exceeded quota" in message:
        return QuotaExceededError
    # of RBAC (`User ... cannot ...`), or of admission plugins as Pod Security
    return ForbiddenError if code == 401 or " cannot " in message else RefusedError


def _seconds(value: str | None) -> float | None:
    """A Retry-After in seconds; a date in it, which Kubernetes never sends, counts as none."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


_CLASSES: Mapping[int, type[ClusterError]] = {
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    **dict.fromkeys((429, 500, 502, 503, 504), UnavailableError),
}
