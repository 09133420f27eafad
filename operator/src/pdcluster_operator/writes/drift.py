"""Detect drift by `metadata.managedFields`: all that we applied last must still be ours. Pure.
Values are never compared, so defaults and webhooks cannot look like drift (docs/design/foreign-
fields.md).
"""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_SENT_METADATA = frozenset(
    {"name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"}
)
_EXCLUDED = frozenset({"metadata", "status"})
_SCALARS = frozenset({str, int, float, bool})


def prepared(manifest: Manifest) -> dict[str, Any]:
    """A manifest as it is sent: without nulls and server fields, `stringData` as `data`."""
    body: dict[str, Any] = _without_nulls(_without(manifest, {"status"}))
    metadata = body["metadata"]
    body["metadata"] = {key: each for key, each in metadata.items() if key in _SENT_METADATA}
    texts = body.pop("stringData", {})
    if texts:
        encoded = {key: base64.b64encode(each.encode()).decode() for key, each in texts.items()}
        body["data"] = {**body.get("data", {}), **encoded}
    return body


def stamped(manifest: Manifest) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def has_drifted(desired: Manifest, live: Manifest) -> bool:
    """True if a live object differs in a field that a prepared and stamped manifest sets."""
    ours: Fields = next(
        (each.get("fieldsV1") or {} for each in _entries(live) if _is_ours(each)), {}
    )
    annotations = live["metadata"].get("annotations") or {}
    is_same = annotations.get(APPLIED) == desired["metadata"]["annotations"][APPLIED]
    metadata = _without(desired["metadata"], {"name", "namespace"})
    sent = {**_without(desired, {"apiVersion", "kind"}), "metadata": metadata}
    return not (is_same and ours and owns(ours, sent))


def writers(live: Manifest) -> list[str]:
    return sorted({str(each.get("manager")) for each in _foreign(live)})


def conflicting_managers(live: Manifest, desired: Manifest) -> list[str]:
    """Those of `writers` that have set a field which the manifest sets."""
    content = _without(desired, _EXCLUDED)
    found = (each for each in _foreign(live) if meets(each["fieldsV1"], content))
    return sorted({str(each.get("manager")) for each in found})


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
    if isinstance(desired, dict):
        for key, value in desired.items():
            inner = fields.get(f"f:{key}")
            if value != [] and (inner is None or (inner and not owns(inner, value))):
                return False
        return True
    return not isinstance(desired, list) or all(map(_Items(fields).own, desired))


class _Items:
    """The items of a list in a set of fields, by the first field of their keys: lists may be long.
    Of a key's other fields an item may leave out what has a default.
    """

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._by_first: defaultdict[tuple[str, Any], list[_Item]] = defaultdict(list)
        for path, inner in fields.items():
            if path.startswith("k:"):
                key = _key(path[2:])
                self._by_first[next(iter(key.items()))].append((key, inner))
        self._firsts = {name for name, _ in self._by_first}

    def own(self, item: Any) -> bool:
        if not isinstance(item, dict):
            return self._has_value(item)
        return any(owns(inner, item) for _, inner in self._named(item))

    def meet(self, item: Any) -> bool:
        """Return whether they set a field of this item: each of its writers shares its key."""
        if not isinstance(item, Mapping):
            return self._has_value(item)
        for key, inner in self._named(item):
            return meets(inner, _without(item, key.keys()))
        return False

    def _has_value(self, item: Any) -> bool:
        return f"v:{json.dumps(item)}" in self._fields

    def _named(self, item: Mapping[str, Any]) -> Iterator["_Item"]:
        given = (name for name in self._firsts if type(item.get(name)) in _SCALARS)
        for name in given:
            for key, inner in self._by_first.get((name, item[name]), ()):
                if all(item.get(other, value) == value for other, value in key.items()):
                    yield key, inner


@lru_cache(maxsize=4096)  # the same few in all objects of a kind
def _key(text: str) -> Mapping[str, Any]:
    key: Mapping[str, Any] = json.loads(text)
    return key


def _entries(live: Manifest) -> Sequence[Mapping[str, Any]]:
    return live["metadata"].get("managedFields") or ()


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return (
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and not entry.get("subresource")
    )


def _foreign(live: Manifest) -> Iterator[Mapping[str, Any]]:
    """Entries of other managers with fields beyond metadata and status.  /scale counts, since it
    writes into spec.
    """
    for entry in _entries(live):
        is_foreign = not _is_ours(entry) and entry.get("manager") not in CONTROL_PLANE
        excluded = {f"f:{name}" for name in _EXCLUDED}
        has_content = (entry.get("fieldsV1") or {}).keys() - excluded
        if is_foreign and entry.get("subresource") != "status" and has_content:
            yield entry


def _without(mapping: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


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
