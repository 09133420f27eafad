"""Detect drift by `metadata.managedFields`: all that we applied last must still be ours. Pure.
Values are never compared, so defaults and webhooks cannot look like drift (docs/design/foreign-
fields.md).
"""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pdcluster_schema.labels import APPLIED, FIELD_MANAGER

Manifest = Mapping[str, Any]
# A set of fields as managedFields writes it: `f:name`, `k:{key of a list item}`, `v:value of a
# list`, and `.`, the thing itself
Fields = Mapping[str, Any]
# An item of a list in such a set: its key, and its own fields
_Item = tuple[Mapping[str, Any], Fields]

CONTROL_PLANE = frozenset({"kube-controller-manager", "cloud-controller-manager"})
_IDENTITY = frozenset({"apiVersion", "kind"})
_SENT_METADATA = frozenset(
    {"name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"}
)
_EXCLUDED = frozenset({"metadata", "status"})
_IDENTITY_METADATA = frozenset({"name", "namespace"})
_SCALARS = frozenset({str, int, float, bool})


def prepared(manifest: Manifest) -> dict[str, Any]:
    """A manifest as it is sent: without nulls and server fields, `stringData` as `data`."""
    body: dict[str, Any] = _without_nulls(
        {key: value for key, value in manifest.items() if key != "status"}
    )
    body["metadata"] = {
        key: value for key, value in body["metadata"].items() if key in _SENT_METADATA
    }
    if "stringData" in body:
        encoded = {
            key: base64.b64encode(value.encode()).decode()
            for key, value in body.pop("stringData").items()
        }
        body["data"] = {**body.get("data", {}), **encoded}
    return body


def stamped(manifest: Manifest) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    return {
        **manifest,
        "metadata": {
            **metadata,
            "annotations": {**metadata.get("annotations", {}), APPLIED: digest},
        },
    }


def has_drifted(desired: Manifest, live: Manifest) -> bool:
    """True if a live object differs in a field that a prepared and stamped manifest sets."""
    ours: Fields = next(
        (entry.get("fieldsV1") or {} for entry in _entries(live) if _is_ours(entry)), {}
    )
    annotations = live["metadata"].get("annotations") or {}
    is_same = annotations.get(APPLIED) == desired["metadata"]["annotations"][APPLIED]
    return not (is_same and ours and owns(ours, _owned_part(desired)))


def writers(live: Manifest) -> list[str]:
    """Other managers of fields in an object, those of metadata and status aside."""
    return sorted(
        {
            str(entry.get("manager"))
            for entry in _entries(live)
            if _is_foreign(entry) and _has_content(entry)
        }
    )


def conflicting_managers(live: Manifest, desired: Manifest) -> list[str]:
    """Those of `writers` that have set a field which the manifest sets."""
    return sorted(
        {
            str(entry.get("manager"))
            for entry in _entries(live)
            if _is_foreign(entry)
            and _has_content(entry)
            and meets(entry["fieldsV1"], _content(desired))
        }
    )


def meets(fields: Fields, desired: Any) -> bool:
    if not fields:
        return True
    if isinstance(desired, Mapping):
        return any(
            f"f:{key}" in fields and meets(fields[f"f:{key}"], value)
            for key, value in desired.items()
        )
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return any(map(_Items(fields).meet, desired))
    return False


def owns(fields: Fields, desired: Any) -> bool:
    """Return whether a set of fields holds all of a value.  A set that is empty is a leaf: a
    scalar, or a list or map that changes owner as a whole.
    """
    if not fields or desired in ({}, []):
        return True
    if isinstance(desired, Mapping):
        return all(
            value == [] or (f"f:{key}" in fields and owns(fields[f"f:{key}"], value))
            for key, value in desired.items()
        )
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return all(map(_Items(fields).own, desired))
    return True


class _Items:
    """The items of a list in a set of fields, by the values of their keys, for long lists."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._by_value: dict[tuple[str, ...], defaultdict[tuple[str, Any], list[_Item]]] = {}
        for path, inner in fields.items():
            if path.startswith("k:"):
                key = _item_key(path)
                found = self._by_value.setdefault(tuple(key), defaultdict(list))
                for pair in key.items():
                    found[pair].append((key, inner))

    def own(self, item: Any) -> bool:
        if not isinstance(item, Mapping):
            return self._has_value(item)
        return any(owns(inner, item) for _, inner in self._named(item))

    def meet(self, item: Any) -> bool:
        """Return whether they set a field of this item: each of its writers shares its key."""
        if not isinstance(item, Mapping):
            return self._has_value(item)
        for key, inner in self._named(item):
            return meets(inner, {name: item[name] for name in item if name not in key})
        return False

    def _has_value(self, item: Any) -> bool:
        return f"v:{json.dumps(item)}" in self._fields

    def _named(self, item: Mapping[str, Any]) -> Iterator["_Item"]:
        for names, by_value in self._by_value.items():
            given = [name for name in names if type(item.get(name)) in _SCALARS]
            likely = min(
                (by_value.get((name, item[name]), []) for name in given), key=len, default=[]
            )
            for key, inner in likely:
                if all(item.get(name, value) == value for name, value in key.items()):
                    yield key, inner


@lru_cache(maxsize=1024)
def _item_key(path: str) -> Mapping[str, Any]:
    """Parsed `k:{...}`; the same few are read for every object, and often."""
    key: Mapping[str, Any] = json.loads(path[2:])
    return key


def _entries(live: Manifest) -> Sequence[Mapping[str, Any]]:
    return live["metadata"].get("managedFields") or ()


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and not entry.get("subresource")
    )


def _is_foreign(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is of another manager; /scale counts, since it writes into spec."""
    return (
        not _is_ours(entry)
        and entry.get("subresource") != "status"
        and entry.get("manager") not in CONTROL_PLANE
    )


def _content(manifest: Manifest) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in _EXCLUDED}


def _has_content(entry: Mapping[str, Any]) -> bool:
    return bool((entry.get("fieldsV1") or {}).keys() - {f"f:{name}" for name in _EXCLUDED})


def _owned_part(desired: Manifest) -> dict[str, Any]:
    metadata = {
        key: value for key, value in desired["metadata"].items() if key not in _IDENTITY_METADATA
    }
    return {
        **{key: value for key, value in desired.items() if key not in _IDENTITY},
        "metadata": metadata,
    }


def _without_nulls(value: Any) -> Any:
    # most of what there is, and to ask for a Mapping takes long
    kind = type(value)
    if kind is dict:
        return {
            key: item if type(item) is str else _without_nulls(item)
            for key, item in value.items()
            if item is not None
        }
    if kind is list:
        return [item if type(item) is str else _without_nulls(item) for item in value]
    if kind in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return _without_nulls(dict(value))
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return _without_nulls(list(value)) if is_list else value
