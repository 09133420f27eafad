"""Detect drift: whether a live object is as we last applied it, and which fields others have added.

The answer comes from `metadata.managedFields`, where the API server keeps, for
each manager, the set of fields that it owns: a field whose value another manager
changes leaves our set.  So an object is as it should be when our annotation
says that we applied exactly this manifest, all of it is still ours, and no other
manager has added to it.  Values are never compared: defaults, quantities written
another way and what an admission webhook puts in cannot look like drift, and a
webhook that insists on its own value starts no endless fight.

Left to others: labels, annotations, finalizers and owner references that they
add; status; the fields that a kind shares (`Kind.shared`); and what the control
plane's own controllers write.  Pure.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

from pdcluster_api.apiserver.kinds import Kind
from pdcluster_api.schema.labels import APPLIED, FIELD_MANAGER

Manifest = Mapping[str, Any]
Fields = Mapping[str, Any]
"""A set of fields as managedFields writes it: `f:name`, `k:{key of a list item}`, `v:value of a
list`, and `.`, the thing itself.
"""

_Paths = frozenset[tuple[str, ...]]

CONTROL_PLANE = frozenset({"kube-controller-manager", "cloud-controller-manager"})
_IDENTITY = frozenset({"apiVersion", "kind"})
_SENT_METADATA = frozenset({"name", "namespace", "labels", "annotations", "ownerReferences", "finalizers"})
_IDENTITY_METADATA = frozenset({"name", "namespace"})


class Drift(Enum):
    """NONE: as it should be.

    OURS: apply it again.  FOREIGN: others have added fields, which must go.
    """

    NONE = "none"
    OURS = "ours"
    FOREIGN = "foreign"


def prepared(manifest: Manifest) -> dict[str, Any]:
    """A manifest as it is sent: without nulls and fields of the server, and `stringData` as
    `data`.
    """
    body: dict[str, Any] = _without_nulls({key: value for key, value in manifest.items() if key != "status"})
    body["metadata"] = {key: value for key, value in body["metadata"].items() if key in _SENT_METADATA}
    if "stringData" in body:
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in body.pop("stringData").items()}
        body["data"] = {**body.get("data", {}), **encoded}
    return body


def stamped(manifest: Manifest) -> dict[str, Any]:
    """A prepared manifest with the annotation that says what was applied."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    return {**manifest, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED: digest}}}


def drift(kind: Kind, desired: Manifest, live: Manifest) -> Drift:
    """Drift of a live object from a prepared and stamped manifest."""
    entries = _entries(live)
    if any(adds(_content(entry, kind), desired) for entry in entries if _is_foreign(entry)):
        return Drift.FOREIGN
    ours = next((entry.get("fieldsV1") or {} for entry in entries if _is_ours(entry)), {})
    annotations = live["metadata"].get("annotations") or {}
    is_same = annotations.get(APPLIED) == desired["metadata"]["annotations"][APPLIED]
    return Drift.NONE if is_same and ours and owns(ours, _owned_part(desired)) else Drift.OURS


def taken_over(kind: Kind, live: Manifest, now: str) -> list[Mapping[str, Any]]:
    """managedFields in which fields that others may not own are ours; the next apply removes them.

    now: RFC3339 time, of an entry that has to be added
    """
    entries = _entries(live)
    ours: Fields = next((entry.get("fieldsV1") or {} for entry in entries if _is_ours(entry)), {})
    others: list[Mapping[str, Any]] = []
    for entry in entries:
        if _is_foreign(entry):
            content = _content(entry, kind)
            ours = merged(ours, content)
            rest = _within(entry.get("fieldsV1") or {}, _left(kind))
            others += [{**entry, "fieldsV1": rest}] if rest else []
        elif not _is_ours(entry):
            others.append(entry)
    head = {"manager": FIELD_MANAGER, "operation": "Apply", "apiVersion": live["apiVersion"], "fieldsType": "FieldsV1", "time": now}
    return [{**head, "fieldsV1": ours}, *others]


def writers(kind: Kind, live: Manifest) -> list[str]:
    """Other managers of fields in an object that only we may own."""
    return sorted({str(entry.get("manager")) for entry in _entries(live) if _is_foreign(entry) and _content(entry, kind)})


def owns(fields: Fields, wanted: Any) -> bool:
    """Return whether a set of fields holds all of a value.

    A set that is empty is a leaf: a scalar, or a list or map that changes owner as a whole.
    """
    if not fields or wanted in ({}, []):
        return True
    if isinstance(wanted, Mapping):
        return all(value == [] or (f"f:{key}" in fields and owns(fields[f"f:{key}"], value)) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return all(_owns_item(fields, item) for item in wanted)
    return True


def adds(fields: Fields, wanted: Any) -> bool:
    """Return whether a set of fields holds anything that a value does not have."""
    return any(_adds_one(path, inner, wanted) for path, inner in fields.items() if path != ".")


def merged(one: Fields, other: Fields) -> dict[str, Any]:
    """The union of two sets of fields."""
    shared = {key: merged(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **shared}


def _owns_item(fields: Fields, item: Any) -> bool:
    if not isinstance(item, Mapping):
        return f"v:{json.dumps(item)}" in fields
    return any(path.startswith("k:") and _is_item(path, item) and owns(inner, item) for path, inner in fields.items())


def _adds_one(path: str, inner: Fields, wanted: Any) -> bool:
    if path.startswith("f:"):
        name = path[2:]
        return not isinstance(wanted, Mapping) or name not in wanted or adds(inner, wanted[name])
    items = wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else ()
    if path.startswith("k:"):
        item = next((item for item in items if isinstance(item, Mapping) and _is_item(path, item)), None)
        return item is None or adds(inner, item)
    return path.startswith("v:") and json.loads(path[2:]) not in items


def _is_item(path: str, item: Mapping[str, Any]) -> bool:
    """Return whether `k:{...}` names this item of a list; a part of the key may be left to its
    default.
    """
    key = _item_key(path)
    return any(name in item for name in key) and all(item.get(name, value) == value for name, value in key.items())


@lru_cache(maxsize=1024)
def _item_key(path: str) -> Mapping[str, Any]:
    """Parsed `k:{...}`; the same few are read for every object, and often."""
    key: Mapping[str, Any] = json.loads(path[2:])
    return key


def _entries(live: Manifest) -> Sequence[Mapping[str, Any]]:
    return live["metadata"].get("managedFields") or ()


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource")


def _is_foreign(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is of another manager; /scale counts, since it writes into spec."""
    return not _is_ours(entry) and entry.get("subresource") != "status" and entry.get("manager") not in CONTROL_PLANE


def _content(entry: Mapping[str, Any], kind: Kind) -> Fields:
    """The part of an entry that only we may own."""
    return _without(entry.get("fieldsV1") or {}, _left(kind))


def _left(kind: Kind) -> _Paths:
    """Fields that others may own."""
    shared = (tuple(f"f:{part}" for part in path.split(".")) for path in kind.shared)
    return frozenset({("f:metadata",), ("f:status",), *shared})


def _without(fields: Fields, paths: _Paths) -> Fields:
    """A set of fields without some; what they leave empty goes too."""
    found = {}
    for name, inner in fields.items():
        kept = _without(inner, _below(paths, name))
        if (name,) not in paths and (kept or not inner):
            found[name] = kept
    return found


def _within(fields: Fields, paths: _Paths) -> Fields:
    """The part of a set of fields that `_without` leaves out."""
    parts = ((name, inner if (name,) in paths else _within(inner, _below(paths, name)), (name,) in paths) for name, inner in fields.items())
    return {name: part for name, part, is_whole in parts if part or is_whole}


def _below(paths: _Paths, name: str) -> _Paths:
    return frozenset(path[1:] for path in paths if path[0] == name and len(path) > 1)


def _owned_part(desired: Manifest) -> dict[str, Any]:
    """A manifest without the fields that identify the object, which have no owner."""
    metadata = {key: value for key, value in desired["metadata"].items() if key not in _IDENTITY_METADATA}
    return {**{key: value for key, value in desired.items() if key not in _IDENTITY}, "metadata": metadata}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, str | int | float):  # most of what there is, and to ask for a Mapping takes long
        return value
    if isinstance(value, dict | Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | Sequence) else value
