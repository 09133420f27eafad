"""A JSON schema as xgrammar enforces it: references gathered, what it cannot enforce left out or
refused.

Every fault is said with its place, a JSON pointer into the schema as it was sent.
An answer under the result is valid under the schema but for what was left out.
The differences that matter: what stands beside a reference or an `anyOf`, `oneOf` or
`allOf` is joined with it (`combining`), an object with `properties` has no others where
the schema does not say so (`finishing`), lists of `items` become `prefixItems`, and every
reference goes to a definition under a plain name.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pdcluster_worker.structured_output.combining import Combining
from pdcluster_worker.structured_output.finishing import finished
from pdcluster_worker.structured_output.intersection import Node, Pointer
from pdcluster_worker.structured_output.listed import settle
from pdcluster_worker.structured_output.patterns import looks_around

MOST_COUNTED = 10_000
"""Characters, items and properties: a larger upper bound is as good as none, a larger lower one is
refused.
"""

MOST_NODES = 10_000
"""Schemas in a schema."""

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
)
_UPPER = ("maxLength", "maxItems", "maxProperties")
_LOWER = ("minLength", "minItems", "minProperties")
_VALUES = ("type", "enum", "const", "format", "pattern", "required", *_UPPER, *_LOWER)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NOT_ENFORCED = (
    *(
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "multipleOf",
    ),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_RULES = (*_VALUES, *_NUMBERS, *_MAPS, *_LISTS, *_SINGLES, *_NOT_ENFORCED)
_BOUNDS = ("pattern", "format", *_UPPER, *_LOWER, *_NUMBERS)
_TYPED = ("type", "enum", "const", "properties", "additionalProperties", "items", "prefixItems")


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message begins with the place."""

    def __init__(self, place: Pointer, what: str) -> None:
        super().__init__(f"{pointer(place)}: {what}")


def pointer(place: Pointer) -> str:
    """A place as a JSON pointer.

    >>> pointer(("properties", "a/b", "anyOf", 0))
    '#/properties/a~1b/anyOf/0'
    """
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in place)
    return "/".join(("#", *parts))


@dataclass(slots=True)
class PreparedSchema:
    """A schema to compile.  nodes: its parts and their places in what was sent, the outer ones
    first.
    """

    schema: Any
    definitions: Node
    nodes: list[tuple[Pointer, Node]] = field(default_factory=list)
    is_json: bool = True

    def whole(self, part: Any) -> Any:
        """A part of it that can stand alone."""
        made = finished(part, is_json=self.is_json)
        return (
            {**made, "$defs": self.definitions}
            if isinstance(made, dict) and self.definitions
            else made
        )


def prepare(schema: Any, *, strict: bool, is_json: bool = True) -> PreparedSchema:
    """strict: refuse what cannot be enforced, instead of leaving it out.  is_json: of JSON, not
    another style.  Raises SchemaError.
    """
    read = _Reading(schema, strict=strict).run()

    def leave_out(place: Pointer, combinator: str, why: str) -> None:
        if strict:
            raise SchemaError(
                (*place, combinator) if combinator in _at(schema, place) else place,
                f"cannot be enforced with all that must hold beside it, as {why}: write them as "
                "one schema, or set strict to false to go without it",
            )

    places = {id(node): place for place, node in read.nodes}
    combining = Combining(read.schema, read.definitions, places, leave_out)
    combined = combining.run()
    definitions = {
        name: finished(part, is_json=is_json) for name, part in combining.definitions.items()
    }
    prepared = PreparedSchema(None, definitions, read.nodes, is_json)
    prepared.schema = prepared.whole(combined)
    return prepared


class _Reading:
    """Checks one schema, and keeps what can be enforced.

    names: of definitions, by the place of what they are.
    """

    def __init__(self, root: Any, *, strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._names: dict[Pointer, str] = {}
        self._due: list[Pointer] = []
        self._prepared = PreparedSchema(None, {})

    def run(self) -> PreparedSchema:
        prepared = self._prepared
        prepared.schema = self._part(self._root, ())
        while self._due:
            place = self._due.pop()
            prepared.definitions[self._names[place]] = self._part(_at(self._root, place), place)
        return prepared

    def _part(self, part: Any, place: Pointer) -> Any:
        if isinstance(part, bool):
            return part
        if not isinstance(part, dict):
            raise SchemaError(place, "must be a schema: an object, true or false")
        if len(self._prepared.nodes) >= MOST_NODES:
            raise SchemaError((), f"has more than {MOST_NODES} schemas in it: make it smaller")
        made: Node = {}
        self._prepared.nodes.append((place, made))
        self._check_enforced(part, place)
        if "$ref" in part:
            made["$ref"] = self._reference(part["$ref"], place)
        made.update(self._values(part, place))
        made.update(self._inner(part, place))
        keyword = settle(made)
        if keyword is not None:
            raise SchemaError(
                (*place, keyword), "has no value that fits what stands beside it in this schema"
            )
        return made

    def _inner(self, part: Node, place: Pointer) -> Node:
        """The schemas in a schema."""
        made: Node = {}
        for name in _MAPS:
            if name in part:
                made[name] = {
                    key: self._part(value, (*place, name, key))
                    for key, value in _items(part[name], (*place, name))
                }
        for name in _LISTS:
            if name in part:
                made[name] = self._parts(part[name], (*place, name))
        for name in _SINGLES:
            if name in part and not isinstance(part[name], list):
                made[name] = self._part(part[name], (*place, name))
        # before 2020: the first items, and those after them
        if isinstance(part.get("items"), list):
            made["prefixItems"] = self._parts(part["items"], (*place, "items"))
            made["items"] = self._part(
                part.get("additionalItems", True), (*place, "additionalItems")
            )
        return made

    def _parts(self, parts: Any, place: Pointer) -> list[Any]:
        if not isinstance(parts, list) or (not parts and place[-1] not in ("prefixItems", "items")):
            raise SchemaError(place, "must be a list of schemas that is not empty")
        return [self._part(part, (*place, index)) for index, part in enumerate(parts)]

    def _values(self, part: Node, place: Pointer) -> Node:
        found = {name: part[name] for name in (*_VALUES, *_NUMBERS) if name in part}
        for name in _NUMBERS:
            if isinstance(found.get(name), bool):  # draft 4: a word about the bound beside it
                found.pop(name)
        for name in (*_UPPER, *_LOWER):
            if name not in found:
                continue
            bound = found[name]
            if isinstance(bound, bool) or not isinstance(bound, int | float) or bound < 0:
                raise SchemaError((*place, name), "must be a number that is not negative")
            if bound > MOST_COUNTED and name in _LOWER:
                raise SchemaError((*place, name), f"can be at most {MOST_COUNTED} here")
            if bound > MOST_COUNTED:
                found.pop(name)
        _check_values(found, place)
        return found

    def _check_enforced(self, part: Node, place: Pointer) -> None:
        if not self._strict:
            return
        for name in _NOT_ENFORCED:
            if name in part and part[name] is not False:
                raise SchemaError(
                    (*place, name),
                    "cannot be enforced: leave it out, or set strict to false to go without it",
                )
        for name, where in _of_no_effect(part):
            raise SchemaError(
                (*place, name),
                f"cannot be enforced {where}: leave it out, or set strict to false to go "
                "without it",
            )

    def _reference(self, reference: Any, place: Pointer) -> str:
        place = (*place, "$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(
                place, "must point into this schema, as #/$defs/name does: others are not fetched"
            )
        target = self._target(reference, place)
        if target == ():
            return "#"
        if target not in self._names:
            self._names[target] = f"d{len(self._names)}"
            self._due.append(target)
        return f"#/$defs/{self._names[target]}"

    def _target(self, reference: str, place: Pointer) -> Pointer:
        """The place that a reference points to."""
        if reference in ("#", "#/"):
            return ()
        if not reference.startswith("#/"):
            anchored = _anchored(self._root, reference[1:])
            if anchored is None:
                raise SchemaError(place, f"{reference!r} is nowhere in the schema")
            return anchored
        found: list[str | int] = []
        part = self._root
        for written in reference[2:].split("/"):
            key = unquote(written).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                found.append(int(key))
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                found.append(key)
                part = part[key]
            else:
                raise SchemaError(place, f"{reference!r} is nowhere in the schema")
        return tuple(found)


def _of_no_effect(part: Node) -> Iterator[tuple[str, str]]:
    """Names of a schema that xgrammar passes over, and where they stand so."""
    if "$ref" in part:
        yield from ((name, "beside $ref") for name in _RULES if name in part)
        return
    if "pattern" in part and "format" in part:
        yield "format", "beside pattern"
    for name in ("pattern", "format"):
        if name in part:
            yield from (
                (length, f"beside {name}")
                for length in ("minLength", "maxLength")
                if length in part
            )
    for name in ("pattern", "patternProperties"):
        if any(map(looks_around, _texts(part.get(name, ())))):
            yield name, "with a lookahead or lookbehind"
    if not any(name in part for name in _TYPED):
        yield from ((name, "without a type") for name in _BOUNDS if name in part)
    properties, required = part.get("properties", {}), part.get("required", [])
    if (
        isinstance(properties, dict)
        and isinstance(required, list)
        and any(name not in properties for name in required)
        and ("patternProperties" in part or part.get("additionalProperties") is False)
    ):
        yield "required", "for a name that is not among the properties"


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [*value] if isinstance(value, dict) else []


def _at(root: Any, place: Pointer) -> Any:
    for key in place:
        root = root[key]
    return root


def _items(value: Any, place: Pointer) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise SchemaError(place, "must be an object whose values are schemas")
    return list(value.items())


def _check_values(found: Node, place: Pointer) -> None:
    kinds = found.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            raise SchemaError((*place, "type"), f"{kind!r} is no type: use {', '.join(TYPES)}")
    if "enum" in found and (not isinstance(found["enum"], list) or not found["enum"]):
        raise SchemaError((*place, "enum"), "must be a list that is not empty")
    required = found.get("required", [])
    if isinstance(required, bool):  # draft 3
        found.pop("required")
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError((*place, "required"), "must be a list of names")
    for name in ("pattern", "format"):
        if not isinstance(found.get(name, ""), str):
            raise SchemaError((*place, name), "must be text")


def _anchored(part: Any, name: str, place: Pointer = ()) -> Pointer | None:
    """The place of the schema that is called so."""
    return next(
        (
            found
            for found, node in _nodes(part, place)
            if node.get("$anchor") == name or node.get("$id") == f"#{name}"
        ),
        None,
    )


def _nodes(part: Any, place: Pointer) -> Iterator[tuple[Pointer, Node]]:
    if isinstance(part, dict):
        yield place, part
    pairs = (
        part.items()
        if isinstance(part, dict)
        else enumerate(part)
        if isinstance(part, list)
        else ()
    )
    for key, value in pairs:
        yield from _nodes(value, (*place, key))
