"""Schemas in the words that xgrammar follows: what has to hold is said where it looks for it."""

from typing import Any

from pdcluster_worker.structured_output.intersection import Node
from pdcluster_worker.structured_output.patterns import as_written

_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = (
    *("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"),
    "propertyNames",
)
_OPENERS = (
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
)


def finished(part: Any, *, is_json: bool) -> Any:
    """A schema and all within it.  is_json: of JSON, not another style."""
    if not isinstance(part, dict):
        return part
    made = dict(part)
    for name in _MAPS:
        if name in part:
            written = as_written if is_json and name == "patternProperties" else str
            made[name] = {
                written(key): finished(value, is_json=is_json) for key, value in part[name].items()
            }
    for name in _LISTS:
        if name in part:
            made[name] = [finished(each, is_json=is_json) for each in part[name]]
    for name in _SINGLES:
        if name in part:
            made[name] = finished(part[name], is_json=is_json)
    if is_json:
        _bound_texts(made)
    _bound_properties(made)
    return made


def _bound_texts(found: Node) -> None:
    """Keep patterns to what JSON can hold as it is written; a format beside one has no effect."""
    if "pattern" in found:
        found.pop("format", None)  # xgrammar would follow it alone
        found["pattern"] = as_written(found["pattern"])


def _bound_properties(found: Node) -> None:
    """Name every required property, and close an object whose schema does not say that there may
    be others.
    """
    was_named = "properties" in found
    unnamed = [
        name for name in found.get("required", ()) if name not in found.get("properties", {})
    ]
    rest = found.get("additionalProperties", True)
    if unnamed and rest is not False and "patternProperties" not in found:
        found["properties"] = found.get("properties", {}) | dict.fromkeys(unnamed, rest)
    is_open = any(name in found for name in _OPENERS)
    if was_named and not is_open and set(found.get("required", ())) <= set(found["properties"]):
        found["additionalProperties"] = False
