"""Finds what is wrong with the JSON schema of a tool's parameters; unknown keywords are let pass,
for the schema language has many dialects.
"""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.text import quoted

MAX_DEPTH = 64
"""Deepest nesting of schemas."""

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")


def check_parameters(schema: dict[str, Any]) -> str | None:
    """Describe the fault of a schema and its place; None where there is none.

    >>> check_parameters({"type": "object", "properties": {"x": {"type": "string", "enum": 1}}})
    'properties.x.enum: must be a list of values that is not empty'
    """
    kind = schema.get("type", "object")
    if kind != "object":
        return f"type: must be object, as arguments are one, not {quoted(kind)}"
    return _check(schema, "", 0)


def _check(schema: Any, path: str, depth: int) -> str | None:
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return f"{_at(path)}must be a schema: an object, true or false, not {quoted(schema)}"
    if depth > MAX_DEPTH:
        return f"{_at(path)}schemas are nested more than {MAX_DEPTH} deep: make it flatter"
    own = _own_fault(schema)
    if own is not None:
        return f"{path}{own}"
    return next(
        (
            wrong
            for name, inner in _inner(schema)
            if (wrong := _check(inner, f"{path}{name}.", depth + 1)) is not None
        ),
        None,
    )


def _own_fault(schema: dict[str, Any]) -> str | None:
    kinds = schema.get("type", [])
    wrong = next(
        (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in _TYPES),
        None,
    )
    if wrong is not None:
        return (
            f"type: must be one of {', '.join(_TYPES[:-1])} and {_TYPES[-1]}, not {quoted(wrong)}"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required: must be a list of names"
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        return "enum: must be a list of values that is not empty"
    for name in _MAPS:
        if not isinstance(schema.get(name, {}), dict):
            return f"{name}: must be an object of schemas by name"
    for name in _LISTS:
        if name in schema and not (isinstance(schema[name], list) and schema[name]):
            return f"{name}: must be a list of schemas that is not empty"
    return None


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _MAPS:
        yield from ((f"{name}.{key}", inner) for key, inner in schema.get(name, {}).items())
    for name in _LISTS:
        yield from (
            (f"{name}.{number}", inner) for number, inner in enumerate(schema.get(name, ()))
        )
    yield from (
        (name, schema[name])
        for name in _SINGLE
        if name in schema and not isinstance(schema[name], list)
    )


def _at(path: str) -> str:
    return f"{path.removesuffix('.')}: " if path else ""
