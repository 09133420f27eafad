"""Join two schemas into one that asks for what both ask for.

Both are flat: no reference and no `anyOf`, `oneOf` or `allOf` at their top.  Schemas
within them that have to hold together become an `allOf`, for the caller to go on with.
What one schema cannot say is reported by its keyword, and the result is the looser for it.
"""

import json
import re
from collections.abc import Callable
from typing import Any

Node = dict[str, Any]
Pointer = tuple[str | int, ...]
Report = Callable[[str], None]

_HIGHEST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWEST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_ENDS = (
    ("minimum", "maximum", ("integer", "number")),
    ("minLength", "maxLength", ("string",)),
    ("minItems", "maxItems", ("array",)),
    ("minProperties", "maxProperties", ("object",)),
)
_LENGTHS = ("minLength", "maxLength")
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_OF_LISTS = ("items", "prefixItems")


def both(one: Any, other: Any) -> Any:
    """A schema of what fits both; schemas that hold together already stay one list, each in it
    once, or those that refer to themselves would grow without end.

    >>> both(True, {"type": "string"})
    {'type': 'string'}
    >>> both({"type": "string"}, False)
    False
    >>> both({"allOf": [{"$ref": "#"}, {"type": "object"}]}, {"$ref": "#"})
    {'allOf': [{'$ref': '#'}, {'type': 'object'}]}
    """
    if one is False or other is False:
        return False
    if one is True or one == {} or one == other:
        return other
    if other is True or other == {}:
        return one
    parts = {key_of(part): part for node in (one, other) for part in _together(node)}
    return {"allOf": list(parts.values())}


def _together(node: Node) -> list[Any]:
    """The schemas that a schema joins and is nothing else than."""
    return node["allOf"] if set(node) == {"allOf"} else [node]


def intersection(one: Node, other: Node, report: Report) -> Node | None:
    """A schema of what fits both; None where nothing does."""
    made = {**one, **other}
    types = _types_of_both(one, other)
    if types is not None:
        made["type"] = types[0] if len(types) == 1 else types
    for names, choose in ((_HIGHEST, max), (_LOWEST, min)):
        made.update(
            {
                name: choose(one[name], other[name])
                for name in names
                if is_number(one.get(name)) and is_number(other.get(name))
            }
        )
    if "required" in one and "required" in other:
        made["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    for name in ("propertyNames", "unevaluatedItems"):
        if name in one and name in other:
            made[name] = both(one[name], other[name])
    if _has_any(one, _OF_OBJECTS) and _has_any(other, _OF_OBJECTS):
        made.update(_objects(one, other, report))
    if _has_any(one, _OF_LISTS) and _has_any(other, _OF_LISTS):
        made.update(_lists(one, other))
    _texts(one, other, made, report)
    _values(one, other, made, report)
    return None if types == [] or made.get("enum") == [] or _is_empty(made) else made


def types_of(node: Node) -> list[str] | None:
    """Types that a schema names; None = any."""
    named = node.get("type")
    return [named] if isinstance(named, str) else named or None


def is_within(kind: str, types: list[str]) -> bool:
    """Return whether each value of a type is of one of these types."""
    return kind in types or (kind == "integer" and "number" in types)


def _types_of_both(one: Node, other: Node) -> list[str] | None:
    first, second = types_of(one), types_of(other)
    if first is None or second is None:
        return first or second
    return list(
        dict.fromkeys(
            [kind for kind in first if is_within(kind, second)]
            + [kind for kind in second if is_within(kind, first)]
        )
    )


def _objects(one: Node, other: Node, report: Report) -> Node:
    named = [*one.get("properties", {}), *other.get("properties", {})]
    made: Node = {
        "properties": {
            name: both(_of_property(one, name), _of_property(other, name))
            for name in dict.fromkeys(named)
        }
    }
    patterns = _patterns(one, other, report) | _patterns(other, one, report)
    if patterns:
        made["patternProperties"] = patterns
    if "additionalProperties" in one or "additionalProperties" in other:
        made["additionalProperties"] = both(_rest(one), _rest(other))
    return made


def _of_property(node: Node, name: str) -> Any:
    """Schema of a property, by its name, its patterns and the rest."""
    requested = [node["properties"][name]] if name in node.get("properties", {}) else []
    requested += [
        value
        for pattern, value in node.get("patternProperties", {}).items()
        if _matches(pattern, name)
    ]
    if not requested:
        return _rest(node)
    found = requested[0]
    for value in requested[1:]:
        found = both(found, value)
    return found


def _patterns(one: Node, other: Node, report: Report) -> Node:
    """Patterns of one schema, with what the other asks of such names."""
    made: Node = {}
    others = other.get("patternProperties", {})
    for pattern, value in one.get("patternProperties", {}).items():
        if pattern in others:
            made[pattern] = both(value, others[pattern])
            continue
        if others:  # a name may match patterns of both
            report("patternProperties")
        if others or _rest(other) is not False:
            made[pattern] = value if others else both(value, _rest(other))
    return made


def _rest(node: Node) -> Any:
    return node.get("additionalProperties", True)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # of another dialect
        return False


def _lists(one: Node, other: Node) -> Node:
    longest = max(len(node.get("prefixItems", ())) for node in (one, other))
    made: Node = {"items": both(one.get("items", True), other.get("items", True))}
    first = [both(_item(one, place), _item(other, place)) for place in range(longest)]
    if False in first:
        first, made["items"] = first[: first.index(False)], False
    if first:
        made["prefixItems"] = first
    return made


def _item(node: Node, place: int) -> Any:
    first = node.get("prefixItems", ())
    return first[place] if place < len(first) else node.get("items", True)


def _texts(one: Node, other: Node, made: Node, report: Report) -> None:
    for name in ("pattern", "format"):
        if name in one and name in other and one[name] != other[name]:
            made[name] = one[name]
            report(name)
    for near, far in ((one, other), (other, one)):
        if ("pattern" in near and "format" in far) or (
            _has_any(near, ("pattern", "format"))
            and not _has_any(far, ("pattern", "format"))
            and _has_any(far, _LENGTHS)
        ):
            report(next(name for name in ("format", *_LENGTHS) if name in far))


def _values(one: Node, other: Node, made: Node, report: Report) -> None:
    """The values that both list, where one does."""
    lists = [_listed(node) for node in (one, other)]
    if lists == [None, None]:
        return
    made.pop("const", None)
    types = types_of(made)
    known = [{key_of(value) for value in values} for values in lists if values is not None]
    made["enum"] = [
        value
        for value in next(values for values in lists if values is not None)
        if all(key_of(value) in keys for keys in known)
        and (types is None or is_within(type_of(value), types))
    ]
    for node, values in zip((one, other), lists, strict=True):
        if values is None and set(node) - {"type"}:
            report("enum")


def _listed(node: Node) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values: list[Any] | None = node.get("enum")
    return values


def type_of(value: Any) -> str:
    """The narrowest type of a value.

    >>> [type_of(value) for value in (True, 1, 2.0, 0.5, None, "a", [], {})]
    ['boolean', 'integer', 'integer', 'number', 'null', 'string', 'array', 'object']
    """
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def key_of(value: Any) -> str:
    """A text that equal values of JSON share."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return json.dumps(whole, sort_keys=True)


def _is_empty(made: Node) -> bool:
    """Return whether the bounds of its only type leave nothing."""
    types = types_of(made)
    return types is not None and any(
        set(types) <= set(kinds)
        and is_number(made.get(least))
        and is_number(made.get(most))
        and made[least] > made[most]
        for least, most, kinds in _ENDS
    )


def is_number(value: Any) -> bool:
    """Return whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_any(node: Node, names: tuple[str, ...]) -> bool:
    return any(name in node for name in names)
