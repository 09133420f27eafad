"""The tools of one request, and calls of them.  A call counts only if its tool is one of the
request's: a model may well answer with JSON that looks like a call.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]

MAX_CALL_CHARACTERS = 1 << 20
"""Longest text that may become a call: more than any context holds is no call."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; parameters: the JSON schema of its arguments."""

    name: str
    parameters: Schema = field(default_factory=dict)
    is_strict: bool = False


Tools = Mapping[str, Tool]
"""Tools by name."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; arguments: a JSON object as text."""

    name: str
    arguments: str


Reader = Callable[[str, Tools], "Sequence[Call] | None"]


def object_of(text: str) -> dict[str, Any] | None:
    """Raw line breaks in strings are let pass: models write them."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_of(value: Any, tools: Tools) -> Call | None:
    """From a name, and `arguments` or `parameters`, an object or the text of one."""
    if (
        not isinstance(value, dict)
        or not isinstance(name := value.get("name"), str)
        or name not in tools
    ):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = object_of(arguments)
    return call_with(name, arguments) if isinstance(arguments, dict) else None


def call_with(name: str, arguments: Mapping[str, Any]) -> Call | None:
    """A call with these arguments; None where JSON cannot say them, or UTF-8."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return Call(name, text)


def all_or_none(calls: Sequence[Call | None]) -> Sequence[Call] | None:
    read = [call for call in calls if call is not None]
    return read if read and len(read) == len(calls) else None
