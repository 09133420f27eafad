"""The tools of one request, calls of them, and values that a model wrote as text."""

import ast
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pdcluster_worker.server.tools.schema_match import SchemaMatch, Validity, type_of

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


Reader = Callable[[str], list[Call] | None]
"""Reads the calls of a text; None where it is none."""


def object_of(text: str) -> dict[str, Any] | None:
    """Raw line breaks in strings are let pass: models write them."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_with(name: str, arguments: Mapping[Any, Any]) -> Call:
    """Raises ValueError or TypeError where JSON cannot say the arguments, or UTF-8."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return Call(name, text)


_JSON_VALUES = {"true": True, "false": False, "null": None}
MAX_PYTHON_CHARACTERS = 1 << 16
"""Python's parser takes about 100 bytes a character."""
_TEXT_ALONE = frozenset({"string"})
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def typed(written: Mapping[str, str], parameters: Schema) -> dict[str, Any]:
    """Arguments by name.  written: what stands between the marks of each.

    >>> number = {"$defs": {"N": {"type": "integer"}}, "properties": {"n": {"$ref": "#/$defs/N"}}}
    >>> typed({"n": "\\n1\\n", "other": "\\n1\\n"}, number)
    {'n': 1, 'other': '1'}
    """
    match = SchemaMatch(parameters)
    ways = match.ways()
    first = _typed(written, match, ways[0])
    if len(ways) == 1 or match.is_valid(first, ways[0]):
        return first
    others = (_typed(written, match, way) for way in ways[1:])
    return next((found for found in others if match.is_valid(found, parameters)), first)


def _typed(written: Mapping[str, str], match: SchemaMatch, schema: Any) -> dict[str, Any]:
    schemas = {name: match.property(schema, name) for name in written}
    return {name: _value(text, match, schemas[name]) for name, text in written.items()}


def _value(text: str, match: SchemaMatch, schema: Any) -> Any:
    types = match.types(schema)
    best, found = Validity.NONE, list[Any]()
    for value in _readings(text, types):
        validity = match.validity(value, schema)
        if not found or validity > best:
            best, found = validity, [value]
        if best is Validity.CERTAIN:
            break
    return found[0]


def _readings(text: str, types: frozenset[str] | None) -> Iterator[Any]:
    """Values that a text may stand for, the likeliest first.  types: None = any."""
    bare = text.strip()
    if types is None:
        yield from (None,) if bare == "null" else ()
    elif "string" not in types:
        yield from (value for value in _values(bare) if type_of(value) in types)
    else:
        yield from (value for value in _unlike_text(bare) if type_of(value) in types)
    unwrapped = text.removeprefix("\n").removesuffix("\n")
    yield from (unwrapped, text.strip("\r\n"), bare, text)
    if types != _TEXT_ALONE or bare.startswith(("'", '"')):
        yield from (value for value in _values(bare) if types is None or type_of(value) in types)


def _unlike_text(text: str) -> Iterator[Any]:
    """Nothing may be lost of a number or a word, as of `007` or `1.50`."""
    if text.startswith(("[", "{")):
        yield from (value for value in _values(text) if isinstance(value, dict | list))
    else:
        yield from (
            value
            for value in _json_values(text)
            if json.dumps(value) == text and not isinstance(value, str)
        )


def _values(text: str) -> Iterator[Any]:
    yield from _json_values(text)
    if text.lower() in _WORDS:
        yield _WORDS[text.lower()]
    yield from _as_json(literal_of(text))


def _json_values(text: str) -> Iterator[Any]:
    try:
        yield from _as_json(json.loads(text, strict=False, parse_constant=_no_number))
    except (ValueError, RecursionError):
        return


def _as_json(value: Any) -> Iterator[Any]:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):
        return
    yield json.loads(text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def literal_of(text: str) -> Any:
    """The value of a Python literal; `...` for any other text."""
    try:
        return literal(python_expression(text))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ...


def python_expression(text: str) -> ast.expr:
    if len(text) > MAX_PYTHON_CHARACTERS:
        raise ValueError(f"more than {MAX_PYTHON_CHARACTERS} characters")
    with warnings.catch_warnings(action="ignore"):  # of what a model wrote
        return ast.parse(text, mode="eval").body


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_VALUES[node.id]) if node.id in _JSON_VALUES else node


def literal(value: ast.expr) -> Any:
    changed = _JsonNames().visit(value)
    assert isinstance(changed, ast.expr)
    return ast.literal_eval(changed)
