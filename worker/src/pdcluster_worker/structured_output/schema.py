"""A JSON schema as llguidance compiles it: checked, closed, its faults with their places."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from pdcluster_worker.structured_output.schema_nodes import (
    LISTS,
    MAPS,
    NO_ANCHORS,
    SINGLES,
    Node,
    Pointer,
    SchemaError,
    anchors_of,
    children,
    is_join,
    looks_around,
    nodes,
    num_schemas,
    of_rust,
    pointer,
    resolve,
)

MAX_COUNT = 10_000
"""Characters, items and properties: a larger upper bound is as good as none, a larger lower one is
refused.
"""

MAX_MULTIPLE = 1_000
MAX_MULTIPLES = 20
MAX_COMMON_MULTIPLE = 100_000
"""Bounds of `multipleOf`: compiling takes time with the least common multiple, where branches have
them, and with the square of their number.
"""

MAX_LOOSENESS = 2

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMATS = tuple(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
_UPPER = ("maxLength", "maxItems", "maxProperties")
_LOWER = ("minLength", "minItems", "minProperties")
_TEXT_RULES = ("pattern", "format")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# fmt: off
_NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
    "unevaluatedProperties", "unevaluatedItems", "propertyNames",
)
# fmt: on
_OPENERS = ("additionalProperties", "patternProperties", "propertyNames")
_DIALECT = ("$schema", "$id", "id")


@dataclass(frozen=True, slots=True)
class PreparedSchema:
    """num_schemas: that llguidance makes of it."""

    schema: Any
    num_schemas: int


def prepare(root: Any, *, strict: bool, looseness: int = 0) -> PreparedSchema:
    """strict: refuse what cannot be enforced, in place of leaving it out.

    looseness: what else is left out, up to MAX_LOOSENESS: 1 = what stands beside references, and
               patterns of names beside one another; 2 = all that would be joined with something,
               and `minLength` beside a pattern or format.
    Raises SchemaError.
    """
    return _Preparation(_loosened(root, 0 if strict else looseness), strict=strict).run()


class _Preparation:
    def __init__(self, root: Any, *, strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._anchors = NO_ANCHORS
        self._multiples: set[float] = set()
        self._common_multiple = 1
        self._joined: set[int] = set()  # schemas that are parts of another, by id

    def run(self) -> PreparedSchema:
        if self._root is False:
            raise SchemaError((), "is false, which no value fits")
        self._anchors = anchors_of(self._root)
        self._check((), self._root)
        count = num_schemas(self._root, lambda reference: self._resolve(reference)[1])
        for _, node in nodes(self._root):
            if is_join(node):
                self._mark_parts(node)
        return PreparedSchema(self._part(self._root), count)

    def _check(self, place: Pointer, part: Any) -> None:
        """Check this schema and all below it, before anything is made of them."""
        due = [(place, part)]
        while due:
            place, part = due.pop()
            if not isinstance(part, bool | dict):
                raise SchemaError(place, "must be a schema: an object, true or false")
            if isinstance(part, dict):
                self._check_node(place, part)
                due += children(place, part)

    def _check_node(self, place: Pointer, node: Node) -> None:
        check_values(place, node)
        if "multipleOf" in node and not self._is_multiple(node["multipleOf"]) and self._strict:
            raise SchemaError(
                (*place, "multipleOf"),
                f"must be a number up to {MAX_MULTIPLE}, of at most {MAX_MULTIPLES} in one schema "
                f"with a common multiple up to {MAX_COMMON_MULTIPLE}, decimal points aside",
            )
        if "$ref" in node:
            try:
                self._resolve(node["$ref"])
            except ValueError as e:
                raise SchemaError((*place, "$ref"), str(e)) from e
        for name in _NOT_ENFORCED if self._strict else ():
            is_enforced = name == "propertyNames" and _name_pattern(node) is not None
            if name in node and node[name] is not False and not is_enforced:
                raise SchemaError(
                    (*place, name), f"cannot be enforced: leave it out, or {_LENIENT}"
                )
        if self._strict and node.get("format", "uri") not in _FORMATS:
            raise SchemaError((*place, "format"), f"is not enforced: {_KNOWN}, or {_LENIENT}")
        for name in ("pattern", "patternProperties") if self._strict else ():
            if any(map(looks_around, _texts(node.get(name)))):
                raise SchemaError(
                    (*place, name), f"has a lookahead or lookbehind: leave it out, or {_LENIENT}"
                )

    def _is_multiple(self, value: Any) -> bool:
        """Return whether a `multipleOf` is enforced, as one of a few."""
        if not isinstance(value, int | float) or not 0 < value <= MAX_MULTIPLE:
            return False
        common = math.lcm(self._common_multiple, _digits(value))
        if len(self._multiples) < MAX_MULTIPLES and common <= MAX_COMMON_MULTIPLE:
            self._common_multiple = common
            self._multiples.add(value)
        return value in self._multiples

    def _resolve(self, reference: Any) -> tuple[Pointer, Any]:
        return resolve(self._root, reference, self._anchors)

    def _mark_parts(self, node: Node) -> None:
        for part in self._parts(node):
            if id(part) not in self._joined:
                self._joined.add(id(part))
                self._mark_parts(part)

    def _parts(self, node: Node) -> Iterator[Node]:
        """Schemas that hold together with this one, or whose branches do."""
        found = [part for name in ("allOf", "anyOf", "oneOf") for part in node.get(name, ())]
        if "$ref" in node:
            found.append(self._resolve(node["$ref"])[1])
        yield from (part for part in found if isinstance(part, dict))

    def _part(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        made = {name: value for name, value in part.items() if name not in _DIALECT}
        if "$ref" in made:
            made["$ref"] = quote(pointer(self._resolve(made["$ref"])[0]), safe="#/~$@:!'()*+,;=&?")
        if not self._is_multiple(made.get("multipleOf")):
            made.pop("multipleOf", None)
        _drop_bounds(made)
        if "pattern" in made:
            made["pattern"] = of_rust(made["pattern"])
        for name in MAPS:
            if name in part:
                written = of_rust if name == "patternProperties" else str
                made[name] = {written(key): self._part(value) for key, value in part[name].items()}
        for name in (*LISTS, *SINGLES):
            if isinstance(part.get(name), list):
                made[name] = [self._part(each) for each in part[name]]
            elif name in part:
                made[name] = self._part(part[name])
        _exclude(made)
        pattern = _name_pattern(part)
        if pattern is not None and part.get("additionalProperties") is not False:
            made["patternProperties"] = {pattern: made.get("additionalProperties", True)}
            made["additionalProperties"] = False
        self._close(made, part)
        return made

    def _close(self, made: Node, part: Node) -> None:
        """An object with `properties` has no others, where its schema does not say so."""
        if id(part) in self._joined:
            return
        parts = [part, *self._all_parts(part)] if is_join(part) else [part]
        rest = part.get("unevaluatedProperties", False)
        names = [name for each in parts for name in _names(each)]
        is_open = any(
            name in each and each[name] is not False for each in parts for name in _OPENERS
        )
        has_names = any("properties" in each for each in parts)
        if is_open or not (has_names or "unevaluatedProperties" in part):
            return
        if len(parts) > 1:
            made["properties"] = dict.fromkeys(names, True) | made.get("properties", {})
        elif not set(names) <= made.get("properties", {}).keys():
            return  # a required name that may be of any schema
        made["additionalProperties"] = self._part(rest)

    def _all_parts(self, node: Node) -> list[Node]:
        found: dict[int, Node] = {}
        due = [node]
        while due:
            for part in self._parts(due.pop()):
                if id(part) not in found:
                    found[id(part)] = part
                    due.append(part)
        return list(found.values())


_LENIENT = "set strict to false to go without it"
_KNOWN = f"use one of {', '.join(_FORMATS)}"


def check_values(place: Pointer, node: Node) -> None:
    """Check the keywords that hold no schema.  Raises SchemaError."""
    kinds = node.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            raise SchemaError((*place, "type"), f"{kind!r} is no type: use {', '.join(TYPES)}")
    if "enum" in node and (not isinstance(node["enum"], list) or not node["enum"]):
        raise SchemaError((*place, "enum"), "must be a list that is not empty")
    required = node.get("required", [])
    if not isinstance(required, bool) and (  # a boolean is draft 3
        not isinstance(required, list) or not all(isinstance(name, str) for name in required)
    ):
        raise SchemaError((*place, "required"), "must be a list of names")
    for name in _TEXT_RULES:
        if not isinstance(node.get(name, ""), str):
            raise SchemaError((*place, name), "must be text")
    for name in (*_UPPER, *_LOWER):
        bound = node.get(name, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound < 0:
            raise SchemaError((*place, name), "must be a number that is not negative")
        if bound > MAX_COUNT and name in _LOWER:
            raise SchemaError((*place, name), f"can be at most {MAX_COUNT} here")


def _drop_bounds(made: Node) -> None:
    for name in _UPPER:
        if made.get(name, 0) > MAX_COUNT:
            del made[name]
    for name in (*_NUMBERS, "required"):
        if isinstance(made.get(name), bool):  # drafts 3 and 4
            del made[name]


def _exclude(made: Node) -> None:
    """Branches of `oneOf` that each require one name exclude those of the others."""
    branches = made.get("oneOf", ())
    if len(branches) < 2 or not all(
        isinstance(each, dict) and each.keys() == {"required"} and len(each["required"]) == 1
        for each in branches
    ):
        return
    names = [each["required"][0] for each in branches]
    made["oneOf"] = [
        {"required": [name], "properties": {other: False for other in names if other != name}}
        for name in names
    ]


def _name_pattern(node: Node) -> str | None:
    """The pattern that `propertyNames` asks of the names of an object's further properties."""
    names = node.get("propertyNames")
    if not isinstance(names, dict) or "patternProperties" in node:
        return None
    if "minLength" in names or "maxLength" in names:
        return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
    pattern = names.get("pattern")
    return pattern if isinstance(pattern, str) and not looks_around(pattern) else None


def _digits(value: float) -> int:
    """A number without its decimal point: 25 of 0.25."""
    number = Decimal(str(value)).normalize()
    return int(number.scaleb(max(0, -int(number.as_tuple().exponent))))


def _names(node: Node) -> list[str]:
    required = node.get("required", ())
    return [*node.get("properties", ()), *([] if isinstance(required, bool) else required)]


def _loosened(root: Any, looseness: int) -> Any:
    if isinstance(root, list):
        return [_loosened(each, looseness) for each in root]
    if not isinstance(root, dict) or not looseness:
        return root
    made = {name: _loosened(value, looseness) for name, value in root.items()}
    if isinstance(made.get("$ref"), str):
        kept = ("$ref", "$defs", "definitions")
        return {name: value for name, value in made.items() if name in kept}
    if isinstance(made.get("patternProperties"), dict) and len(made["patternProperties"]) > 1:
        del made["patternProperties"]
        made["additionalProperties"] = True
    if looseness == MAX_LOOSENESS and any(isinstance(made.get(name), str) for name in _TEXT_RULES):
        made.pop("minLength", None)
    if looseness == MAX_LOOSENESS and isinstance(made.get("allOf"), list):
        made["allOf"] = made["allOf"][:1]
    for name in ("allOf", "anyOf", "oneOf") if looseness == MAX_LOOSENESS else ():
        if isinstance(made.get(name), list) and is_join(made):
            del made[name]
    return made


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [*value] if isinstance(value, dict) else []
