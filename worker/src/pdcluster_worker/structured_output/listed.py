"""Rules of one schema that bear on one another: listed values and what stands beside them, bounds
of whole numbers, and lists that are shorter than their first items.
"""

import math
from typing import Any

from pdcluster_worker.structured_output.intersection import (
    Node,
    is_number,
    is_within,
    key_of,
    type_of,
    types_of,
)

_ROUNDED = {
    "minimum": math.ceil,
    "exclusiveMinimum": math.floor,
    "maximum": math.floor,
    "exclusiveMaximum": math.ceil,
}


def settle(made: Node) -> str | None:
    """Bring the rules of a schema together, in place; returns the keyword that leaves no value.

    >>> schema = {"type": "integer", "enum": [1, "a", 7], "maximum": 6.5}
    >>> settle(schema), schema
    (None, {'type': 'integer', 'enum': [1], 'maximum': 6})
    """
    types = types_of(made)
    if types is not None and "integer" in types and "number" not in types:
        made.update(
            (name, rounded(made[name]))
            for name, rounded in _ROUNDED.items()
            if isinstance(made.get(name), float) and math.isfinite(made[name])
        )
    _shorten(made)
    listed = made.get("enum", [made.get("const")])
    if "const" in made and (
        not _fits(made["const"], made, types) or key_of(made["const"]) not in map(key_of, listed)
    ):
        return "const"
    if "enum" in made:
        made["enum"] = [value for value in made["enum"] if _fits(value, made, types)]
        return None if made["enum"] else "enum"
    return None


def _shorten(made: Node) -> None:
    most, first = made.get("maxItems"), made.get("prefixItems", ())
    if most is None or most >= len(first):
        return
    made["prefixItems"] = first[: int(most)]
    made["items"] = False
    if not made["prefixItems"]:
        del made["prefixItems"], made["items"]


def _fits(value: Any, made: Node, types: list[str] | None) -> bool:
    """Return whether a listed value is of the types, lists and bounds beside it."""
    return (
        (types is None or is_within(type_of(value), types))
        and ("const" not in made or key_of(value) == key_of(made["const"]))
        and _is_between(value, made)
        and (
            not isinstance(value, str)
            or made.get("minLength", 0) <= len(value) <= made.get("maxLength", math.inf)
        )
    )


def _is_between(value: Any, made: Node) -> bool:
    bounds = {name: made[name] for name in _ROUNDED if is_number(made.get(name))}
    return not is_number(value) or (
        bounds.get("minimum", value) <= value <= bounds.get("maximum", value)
        and ("exclusiveMinimum" not in bounds or value > bounds["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or value < bounds["exclusiveMaximum"])
    )
