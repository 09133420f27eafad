"""Strategic merge of a user's pod template over the rendered one, as `kubectl patch` does it.

Maps are merged, null removes a field, lists of named things are merged by
their key, other lists are replaced.  `$patch: replace` takes the user's part
alone, `$patch: delete` removes.  The function is total: what makes no sense as
a pod is refused by the API server, which names the field.
"""

import copy
from collections.abc import Hashable
from typing import Any

_PATCH = "$patch"
_DELETED = object()
_Identity = tuple[Hashable, ...]
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
# of a probe or a hook: one of them only
_ACTIONS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})


def merge_pod_template(rendered: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A new template: `patch` over `rendered`; neither is changed."""
    return _merge_maps(copy.deepcopy(rendered), copy.deepcopy(patch))


def _merge_maps(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    directive = patch.pop(_PATCH, None)
    if directive == "delete":
        return {}
    merged = {} if directive == "replace" else base
    if _ACTIONS & patch.keys():
        merged = {
            key: value for key, value in merged.items() if key in patch or key not in _ACTIONS
        }
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_values(key, merged.get(key), value)
    return merged


def _merge_values(field: str, base: Any, patch: Any) -> Any:
    if isinstance(patch, dict):
        return _merge_maps(base if isinstance(base, dict) else {}, patch)
    if isinstance(patch, list) and field in _KEYS:
        return _merge_lists(field, base if isinstance(base, list) else [], patch)
    return patch


def _merge_lists(field: str, base: list[Any], patch: list[Any]) -> list[Any]:
    """By key and in the order of `base`; what is new comes last.

    An item of nothing but `$patch: replace` drops all of `base`.
    """
    merged = [] if {_PATCH: "replace"} in patch else base
    places = {
        identity: place
        for place, item in enumerate(merged)
        if (identity := _identity(field, item)) is not None
    }
    for item in patch:
        if not isinstance(item, dict):
            merged.append(item)
        elif item != {_PATCH: "replace"}:
            _merge_item(field, merged, places, item)
    return [item for item in merged if item is not _DELETED]


def _merge_item(
    field: str, merged: list[Any], places: dict[_Identity, int], item: dict[str, Any]
) -> None:
    identity = _identity(field, item)
    place = None if identity is None else places.get(identity)
    if item.get(_PATCH) == "delete":
        if identity is not None and place is not None:
            merged[place] = _DELETED
            del places[identity]
        return
    if place is None:
        if identity is not None:
            places[identity] = len(merged)
        merged.append(_merge_maps({}, item))
        return
    base = merged[place]
    if field == "volumes" and len(item) > 1:  # a volume has one source: another one takes its place
        base = {key: value for key, value in base.items() if key in item}
    merged[place] = _merge_maps(base, item)


def _identity(field: str, item: Any) -> _Identity | None:
    """Values of the item's merge keys; None when it lacks one."""
    keys = _KEYS[field]
    return (
        tuple(value if isinstance(value := item[key], Hashable) else repr(value) for key in keys)
        if isinstance(item, dict) and all(key in item for key in keys)
        else None
    )
