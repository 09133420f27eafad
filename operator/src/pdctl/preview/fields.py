"""The fields in which two objects differ, by their paths in YAML."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from pdcluster_schema.engine import BY_DEVICE, EngineSpec
from pdcluster_schema.pdcluster import PDCluster

Differing = tuple[str, Any, Any]
"""(path, value before, value after); None = not given"""


def changed_fields(old: PDCluster, new: PDCluster) -> list[Differing]:
    """In the order of the sections; pools are matched by name."""
    before, after = dict(_leaves("", _document(old))), dict(_leaves("", _document(new)))
    paths = list(dict.fromkeys([*before, *after]))
    differing = [
        (path, before.get(path), after.get(path))
        for path in paths
        if before.get(path) != after.get(path)
    ]
    return [*differing, *_newly_given(old.spec.engine, new.spec.engine)]


def _newly_given(old: EngineSpec, new: EngineSpec) -> Iterator[Differing]:
    """Sizes that are equal on a CPU, given by one engine and left out by the other."""
    before, after = _sizes(old, old.model_fields_set), _sizes(new, new.model_fields_set)
    same = _sizes(old, BY_DEVICE).items() & _sizes(new, BY_DEVICE).items()
    for name in sorted(dict(same).keys() & (before.keys() ^ after.keys())):
        yield f"spec.engine.{name}", before.get(name), after.get(name)


def _sizes(engine: EngineSpec, fields: Set[str]) -> dict[str, Any]:
    return engine.model_dump(mode="json", by_alias=True, include=set(BY_DEVICE & fields))


def _document(cluster: PDCluster) -> dict[str, Any]:
    """With defaults, except in a role's engine, whose values override `spec.engine`."""
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
    """A list of entries with names, such as pools; not in a pod template."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and "name" in entry for entry in value)
    )
