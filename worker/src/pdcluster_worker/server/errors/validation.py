"""Pydantic's errors about a body as one RequestError, whose words name the field."""

import re
from typing import Any

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors.openai import sendable

_SHOULD = re.compile("^(Input|String|List) should")
_ITEMS = re.compile("^Value should(.*) item(s?) after validation, not .*")
_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "dict_type")

Path = tuple[int | str, ...]
"""Names and places that lead to a field of a body."""


def from_validation(errors: Any, body: Any) -> RequestError:
    """errors: of pydantic, their `loc` without a prefix; the first fault counts."""
    path, message, num_more = _first_fault(errors, body)
    if not path:
        return not_an_object()
    param = shortened(sendable(indexed(path)), 200)
    more = f" (and {num_more} more)" if num_more else ""
    return RequestError(f"{param}: {message}{more}", param=param)


def not_an_object() -> RequestError:
    return RequestError(
        "the body must be a JSON object, sent with the header content-type: application/json"
    )


def _first_fault(errors: Any, body: Any) -> tuple[Path, str, int]:
    """Errors count that come farthest into the value: a union has one for each member."""
    path, num_before = _field_path(errors[0], body)
    if num_before is None:
        return path, _words(errors[0]), len(errors) - 1
    start = errors[0]["loc"][:num_before]
    tried = [
        (_field_path(error, body)[0], error)
        for error in errors
        if error["loc"][:num_before] == start
    ]
    path = max((path for path, _ in tried), key=len)
    message = dict.fromkeys(_words(error) for place, error in tried if place == path)
    return path, " or ".join(message).replace(" or must be ", " or "), len(errors) - len(tried)


def _field_path(error: Any, body: Any) -> tuple[Path, int | None]:
    """The place in the body, and how many parts of `loc` come before made-up names."""
    path: list[int | str] = []
    num_before = None
    place = body
    parts = error["loc"]
    for number, part in enumerate(parts):
        is_missing = error["type"] == "missing" and number == len(parts) - 1
        if isinstance(part, int) or is_missing or (isinstance(place, dict) and part in place):
            path.append(part)
            place = _inner(place, part)
        elif not part.startswith("<") and num_before is None:
            num_before = number
    return tuple(path), num_before


def _inner(place: Any, part: int | str) -> Any:
    try:
        return place[part]
    except (LookupError, TypeError):
        return None


def _words(error: Any) -> str:
    if error["type"] in _NOT_AN_OBJECT:
        return "must be an object"
    message = error["msg"]
    if error["type"] in ("too_short", "too_long") and isinstance(error["input"], str):
        # A length that pydantic checks after a function of ours: it says items of anything.
        message = _ITEMS.sub(r"String should\1 character\2", message)
    return (
        _SHOULD.sub("must", message)
        .replace("Field required", "is required")
        .replace(" after validation", "")
    )


def indexed(path: Path) -> str:
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
