"""Reads a JSON schema: the possible types of a value, and whether one is valid."""

import operator
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any
from urllib.parse import unquote

MOST_STEPS = 5_000
"""For one call: a few milliseconds each thousand."""
MOST_DEPTH = 100
"""Deeper than `schemas.chat_fields.MAX_DEPTH`, since a reference is a step of its own."""

Node = Mapping[str, Any]
Comparison = Callable[[Any, Any], bool]

_BOUNDS: Mapping[str, Comparison] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_SIZES: Mapping[str, Mapping[str, Comparison]] = {
    kind: {f"min{unit}": operator.ge, f"max{unit}": operator.le}
    for kind, unit in (("string", "Length"), ("array", "Items"), ("object", "Properties"))
}

_IMPLIED: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "patternProperties", "additionalProperties", "required"),
    "array": ("items", "prefixItems"),
}
"""Keywords that only make sense with a type."""


def type_of(value: Any) -> str:
    """The type of a JSON value; integer also of a number without a fraction.

    >>> type_of(True), type_of(2.0), type_of(2.5), type_of([])
    ('boolean', 'integer', 'number', 'array')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


class Validity(IntEnum):
    NONE = 0
    POSSIBLE = 1
    CERTAIN = 2


class SchemaMatch:
    """Takes the unknown and what takes too long for valid; a client's expressions are not run."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._num_unknown = 0  # values that were taken for valid, as it cannot be said
        self._types: dict[int, tuple[Node, frozenset[str] | None]] = {}  # by the schema's id

    def types(self, schema: Any, depth: int = 0) -> frozenset[str] | None:
        """The types that a value may have; None where the schema does not say."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or depth > MOST_DEPTH:
            return None
        if id(schema) not in self._types:
            self._types[id(schema)] = (schema, None)  # what it says of itself is nothing
            self._types[id(schema)] = (schema, self._types_of(schema, depth + 1))
        return self._types[id(schema)][1]

    def _types_of(self, schema: Node, depth: int) -> frozenset[str] | None:
        declared = [
            *_own_types(schema),
            *(self.types(part, depth) for part in self._siblings(schema)),
        ]
        for name in ("anyOf", "oneOf"):
            ways = [self.types(part, depth) for part in _list(schema, name)]
            named = [types for types in ways if types is not None]
            if ways and len(named) == len(ways):
                declared.append(frozenset().union(*named))
        found = [types for types in declared if types is not None]
        if found:
            return frozenset.intersection(*found)
        implied = [kind for kind, names in _IMPLIED.items() if not schema.keys().isdisjoint(names)]
        return frozenset(implied) if implied else None

    def property(self, schema: Any, name: str, depth: int = 0) -> Any:
        """The schema of an object's property; True where nothing is said of it."""
        if not isinstance(schema, dict) or self._is_spent(depth):
            return True
        found = [self.property(part, name, depth + 1) for part in self._siblings(schema)]
        for way in ("anyOf", "oneOf"):
            parts = [self.property(part, name, depth + 1) for part in _list(schema, way)]
            found += [{"anyOf": parts}] if parts else []
        found.append(_own_property(schema, name))
        declared = [part for part in found if part is not True]
        return declared[0] if len(declared) == 1 else {"allOf": declared} if declared else True

    def validity(self, value: Any, schema: Any, depth: int = 0) -> Validity:
        num_unknown = self._num_unknown
        if not self.is_valid(value, schema, depth):
            self._num_unknown = num_unknown  # whatever else is known
            return Validity.NONE
        return Validity.CERTAIN if self._num_unknown == num_unknown else Validity.POSSIBLE

    def is_valid(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Return whether the schema takes the value, as far as is known."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) or self._is_spent(depth):
            self._num_unknown += 1
            return True
        self._num_unknown += _is_expressed(value, schema)
        return (
            _keeps_own(value, schema)
            and all(self.is_valid(value, part, depth + 1) for part in self._siblings(schema))
            and self._is_one_of(value, schema, depth + 1)
            and all(self.is_valid(inner, part, depth + 1) for inner, part in _within(value, schema))
        )

    def _is_one_of(self, value: Any, schema: Node, depth: int) -> bool:
        num_unknown = self._num_unknown
        any_of = [self.validity(value, part, depth) for part in _list(schema, "anyOf")]
        if Validity.CERTAIN in any_of:
            self._num_unknown = num_unknown
        one_of = [self.validity(value, part, depth) for part in _list(schema, "oneOf")]
        return (
            (any(any_of) or not any_of)
            and (any(one_of) or not one_of)
            and one_of.count(Validity.CERTAIN) <= 1
        )

    def ways(self) -> list[Any]:
        root = self._root
        own = [part for part in (root, *self._siblings(root)) if isinstance(part, dict)]
        ways = [way for part in own for name in ("anyOf", "oneOf") for way in _list(part, name)]
        return [root, *({"allOf": [root, way]} for way in ways)]

    def _siblings(self, schema: Node) -> Iterator[Any]:
        if "$ref" in schema:
            yield self._resolved(schema["$ref"])
        yield from _list(schema, "allOf")

    def _resolved(self, reference: Any) -> Any:
        part = self._root
        if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
            return True
        for written in filter(None, reference[1:].split("/")):
            key = unquote(written).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                return True
        return part

    def _is_spent(self, depth: int) -> bool:
        self._steps += 1
        return depth > MOST_DEPTH or self._steps > MOST_STEPS


def _own_types(schema: Node) -> Iterator[frozenset[str]]:
    kinds = schema.get("type")
    if kinds is not None:
        named = frozenset(map(str, kinds if isinstance(kinds, list) else [kinds]))
        yield named | {"integer"} if "number" in named else named
    if isinstance(schema.get("enum"), list):
        yield frozenset(map(type_of, schema["enum"]))
    if "const" in schema:
        yield frozenset({type_of(schema["const"])})


def _own_property(schema: Node, name: str) -> Any:
    own = _map(schema, "properties")
    if name in own:
        return own[name]
    patterns = [*_map(schema, "patternProperties").values()]
    rest = schema.get("additionalProperties", True)
    return {"anyOf": [*patterns, rest]} if patterns else rest


def _keeps_own(value: Any, schema: Node) -> bool:
    kind = type_of(value)
    if any(kind not in types for types in _own_types(schema)):
        return False
    listed = [[schema["const"]]] if "const" in schema else []
    listed += [schema["enum"]] if isinstance(schema.get("enum"), list) else []
    if not all(any(_is_same(value, each) for each in values) for values in listed):
        return False
    if _is_expressed(value, schema) and value != value.strip():
        return False
    if kind in ("integer", "number"):
        return _is_in_bounds(value, schema, _BOUNDS)
    required = schema.get("required") if kind == "object" else None
    if isinstance(required, list) and not {*map(str, required)} <= value.keys():
        return False
    return kind not in _SIZES or _is_in_bounds(len(value), schema, _SIZES[kind])


def _is_expressed(value: Any, schema: Node) -> bool:
    return isinstance(value, str) and ("pattern" in schema or "format" in schema)


def _is_same(value: Any, listed: Any) -> bool:
    return type_of(value) == type_of(listed) and value == listed


def _is_in_bounds(value: float, schema: Node, bounds: Mapping[str, Comparison]) -> bool:
    return all(
        keeps(value, bound)
        for name, keeps in bounds.items()
        if isinstance(bound := schema.get(name), int | float) and not isinstance(bound, bool)
    )


def _within(value: Any, schema: Node) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from ((inner, _own_property(schema, name)) for name, inner in value.items())
    elif isinstance(value, list):
        first, rest = _list(schema, "prefixItems"), schema.get("items", True)
        if isinstance(rest, list):  # before 2020
            first, rest = rest, schema.get("additionalItems", True)
        yield from zip(value, [*first, *[rest] * (len(value) - len(first))], strict=False)


def _list(schema: Node, name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _map(schema: Node, name: str) -> Node:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}
