"""Reads and checks JSON bodies; large ones in threads, without holding the interpreter lock."""

import asyncio
import email.message
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from json import decoder, scanner
from typing import Any, ParamSpec, TypeVar

import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError

from pdcluster_schema.text import shortened
from pdcluster_worker.errors import RequestError
from pdcluster_worker.server.errors import sendable

INLINE_BYTES = 4096
"""Largest body whose work is done at once: 2 ms at most, near what a thread would add."""

_THREADS = 4
_SWITCH_SECONDS = 0.0005
"""Longest wait of the event loop for the lock after each call to the kernel.  A step of all streams
has tens of such calls, each of which would wait for Python's default, 5 ms.
"""

MAX_CONTAINERS = 1 << 16
"""Objects and lists of one body: each takes 100 times the memory of its text, and the garbage
collector looks at all of them in one go.  10,000 messages with a call each have half as many.
"""

_MAX_FAST_QUOTES = 1 << 18
"""Two of each string, keys included: a C decoder makes so many strings in 20 ms."""

_SHOULD = re.compile("^(Input|String|List) should")
_ITEMS = re.compile("^Value should(.*) item(s?) after validation, not .*")
_NOT_AN_OBJECT = ("model_type", "model_attributes_type", "dict_type")

Path = tuple[int | str, ...]
"""Names and places that lead to a field of a body."""

ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")

_fast = msgspec.json.Decoder()
_threads = ThreadPoolExecutor(
    _THREADS, "large-request", initializer=partial(sys.setswitchinterval, _SWITCH_SECONDS)
)


async def off_loop(
    num_bytes: int, work: Callable[ArgsT, ResultT], *args: ArgsT.args, **kwargs: ArgsT.kwargs
) -> ResultT:
    """The result of `work`, which is about a body of so many bytes; raises what it raises.

    In a thread it must be many short steps, or let go of the interpreter lock.
    """
    if num_bytes <= INLINE_BYTES:
        return work(*args, **kwargs)
    run = partial(copy_context().run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, run)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field whose value, of any type, changes nothing.  reason: why that is right."""

    reason: str


def checked(
    content: bytes, content_type: str, adapter: TypeAdapter[Any]
) -> tuple[Any, tuple[str, ...]]:
    """The body as its schema has it, and its fields that change nothing: hints, and those that no
    schema has.  Raises RequestError naming the field that is wrong.
    """
    value = _value(content, content_type)
    try:
        body = adapter.validate_python(value)
    except ValidationError as e:
        raise from_validation(e.errors(include_url=False), value) from e
    schema: type[BaseModel] = type(body)
    effective = _effective_fields(schema)
    given = (name for name, each in value.items() if each is not None)
    return body, tuple(name for name in given if name not in effective)


@cache
def _effective_fields(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(
        name
        for name, field in schema.model_fields.items()
        if not any(isinstance(marker, Ignored) for marker in field.metadata)
    )


def _value(content: bytes, content_type: str) -> Any:
    if not content:
        raise _not_an_object()
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
    return bool(re.fullmatch(r"application/(.*\+)?json", message.get_content_type()))


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


# --- pydantic's errors --------------------------------------------------------------------------


def from_validation(errors: Any, body: Any) -> RequestError:
    """errors: of pydantic, their `loc` without a prefix; the first fault counts."""
    path, message, num_more = _first_fault(errors, body)
    if not path:
        return _not_an_object()
    param = shortened(sendable(indexed(path)), 200)
    more = f" (and {num_more} more)" if num_more else ""
    return RequestError(f"{param}: {message}{more}", param=param)


def _not_an_object() -> RequestError:
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
            try:
                place = place[part]
            except (LookupError, TypeError):
                place = None
        elif not part.startswith("<") and num_before is None:
            num_before = number
    return tuple(path), num_before


def _words(error: Any) -> str:
    if error["type"] in _NOT_AN_OBJECT:
        return "must be an object"
    message = error["msg"]
    if error["type"] in ("too_short", "too_long") and isinstance(error["input"], str):
        # A length that pydantic checks after a function of ours: it says items of anything.
        message = _ITEMS.sub(r"String should\1 character\2", message)
    message = _SHOULD.sub("must", message).replace("Field required", "is required")
    return str(message.replace(" after validation", ""))


def indexed(path: Path) -> str:
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
