"""The fields in which two objects differ, by their paths in YAML."""

from collections.abc import Iterator, Mapping
from typing import Any

from pdcluster_api.schema.pdcluster import PDCluster

Differing = tuple[str, Any, Any]
"""(path, value before, value after); None = not given"""


def changed_fields(old: PDCluster, new: PDCluster) -> list[Differing]:
    """Every field whose value differs, in the order of the sections; pools are matched by name."""
    before, after = dict(_leaves("", _document(old))), dict(_leaves("", _document(new)))
    paths = list(dict.fromkeys([*before, *after]))
    return [
        (path, before.get(path), after.get(path))
        for path in paths
        if before.get(path) != after.get(path)
    ]


def _document(cluster: PDCluster) -> dict[str, Any]:
    """Fill in every default, except in a role's engine, whose values override `spec.engine`."""
    document = cluster.model_dump(mode="json", by_alias=True)
    for name, role in cluster.spec.roles.present().items():
        document["spec"]["roles"][name]["engine"] = role.engine.model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
    return document


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    elif _is_named(value):
        for entry in value:
            yield from _leaves(
                f"{path}[{entry['name']}]",
                {key: inner for key, inner in entry.items() if key != "name"},
            )
    elif value not in (None, []):
        yield path, value


def _is_named(value: Any) -> bool:
    """Return whether it is a list of entries with names, as pools; not of a pod template."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and "name" in entry for entry in value)
    )
