"""Reads and checks JSON bodies without holding other threads up for long: `json.loads` keeps the
interpreter lock to the end of a body, 0.2 s for 4 MiB of small lists.
"""

import email.message
import json
from collections.abc import Callable
from functools import lru_cache
from json import decoder, scanner
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors.validation import from_validation, not_an_object
from pdcluster_worker.server.http.off_loop import INLINE_BYTES

MAX_CONTAINERS = 1 << 16
"""Objects and lists of one body: each takes 100 times the memory of its text, and the garbage
collector looks at all of them in one go.  10,000 messages with a call each have half as many.
"""

_MAX_FAST_QUOTES = 1 << 18
"""Two of each string, keys included: a C decoder makes so many strings in 20 ms."""

_fast = msgspec.json.Decoder()


def checked(content: bytes, content_type: str, adapter: TypeAdapter[Any]) -> Any:
    """The body as its schema has it.  Raises RequestError naming the field that is wrong."""
    value = _value(content, content_type)
    try:
        return adapter.validate_python(value)
    except ValidationError as e:
        raise from_validation(e.errors(include_url=False), value) from e


def _value(content: bytes, content_type: str) -> Any:
    if not content:
        raise not_an_object()
    if not _is_json(content_type):
        return content
    try:
        return parsed(content)
    except json.JSONDecodeError as e:
        message = f"the body is not valid JSON: {e.msg} at character {e.pos}"
        raise RequestError(message) from e
    except (ValueError, RecursionError) as e:
        raise RequestError(
            "the body is not JSON that can be read: it is nested too deeply, has an overlong "
            "number or is not UTF-8"
        ) from e


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    """
    >>> [_is_json(name) for name in ("application/json; charset=utf-8", "application/ld+json",
    ...     "text/plain", "")]
    [True, True, False, False]
    """
    message = email.message.Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )


def num_containers(text: bytes | str) -> int:
    if isinstance(text, bytes):
        return text.count(b"{") + text.count(b"[")
    return text.count("{") + text.count("[")


def parsed(content: bytes) -> Any:
    """Raises as `json.loads`, and RequestError 413 for more than MAX_CONTAINERS."""
    if len(content) <= INLINE_BYTES:
        return json.loads(content)
    if num_containers(content) <= MAX_CONTAINERS and content.count(b'"') <= _MAX_FAST_QUOTES:
        try:
            return _fast.decode(content)
        except (ValueError, RecursionError):
            pass  # json takes more (NaN, UTF-16), or says in its own words what is wrong
    return _InSteps().decode(content.decode(json.detect_encoding(content), "surrogatepass"))


class _InSteps(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object)
        self._num_containers = 0
        self.parse_object = self._counted(decoder.JSONObject)  # type: ignore[attr-defined]
        self.parse_array = self._counted(decoder.JSONArray)  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._num_containers += 1
            if self._num_containers > MAX_CONTAINERS:
                raise _too_many("the body has", "objects and lists")
            return parse(*args)

        return counted


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members) > MAX_CONTAINERS:
        raise _too_many("an object of the body has", "members")
    return dict(members)


def _too_many(what: str, of_what: str) -> RequestError:
    message = f"{what} more than {MAX_CONTAINERS} {of_what}, the limit of this server: send fewer"
    return RequestError(message, status=413, code="body_too_large")
