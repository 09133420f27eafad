"""An API server in memory, as far as reconciles of one PDCluster use it."""

import copy
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pdcluster_api.apiserver.errors import ConflictError
from pdcluster_api.apiserver.kinds import Kind
from pdcluster_operator.informer.cache import name_of
from pdcluster_schema.labels import FIELD_MANAGER

Body = dict[str, Any]


class FakeApi:
    """objects: by kind and name; writes: verb and object, in their order"""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Body] = {}
        self.writes: list[str] = []
        self._version = 100

    def put(self, kind: str, body: Mapping[str, Any]) -> Body:
        self._version += 1
        metadata = {
            "uid": f"uid-{self._version}",
            **body["metadata"],
            "resourceVersion": str(self._version),
        }
        stored = {**copy.deepcopy(dict(body)), "metadata": metadata}
        self.objects[kind, metadata["name"]] = stored
        return copy.deepcopy(stored)

    async def find(self, kind: Kind, namespace: str, name: str) -> Body | None:
        return copy.deepcopy(self.objects.get((kind.name, name)))

    async def list(self, kind: Kind, *_: object, **__: object) -> AsyncIterator[Body]:
        for key, body in list(self.objects.items()):
            if key[0] == kind.name:
                yield copy.deepcopy(body)

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        name = name_of(kind.name, body).name
        self.writes.append(f"create {kind} {name}")
        if (kind.name, name) in self.objects:
            raise ConflictError(f"{kind} {name} exists")
        return self.put(kind.name, body)

    async def apply(self, kind: Kind, body: Mapping[str, Any], *, force: bool = True) -> Body:
        name = name_of(kind.name, body).name
        self.writes.append(f"apply {kind} {name}")
        if not force and (kind.name, name) in self.objects:
            raise ConflictError(f"{kind} {name} exists")
        before = self.objects.get((kind.name, name), {"metadata": {}})
        owned = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": _fields(body)}
        metadata = {**before["metadata"], **body["metadata"], "managedFields": [owned]}
        return self.put(kind.name, {**before, **body, "metadata": metadata})

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> Body:
        self.writes.append(f"patch {kind} {name}")
        return self.put(kind.name, _merged(self.objects[kind.name, name], patch))

    async def patch_status(self, kind: Kind, namespace: str, name: str, operations: Any) -> Body:
        self.writes.append(f"status {kind} {name}")
        return self.put(
            kind.name, {**self.objects[kind.name, name], "status": operations[1]["value"]}
        )

    async def delete(self, kind: Kind, namespace: str, name: str, **_: object) -> None:
        self.writes.append(f"delete {kind} {name}")
        self.objects.pop((kind.name, name), None)


def _fields(value: Any) -> Body:
    """The set of fields of a manifest, each list as a whole."""
    if not isinstance(value, Mapping):
        return {}
    return {f"f:{key}": _fields(each) for key, each in value.items()}


def _merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> Body:
    merged = dict(before)
    for key, value in patch.items():
        inner = merged.get(key, {})
        merged[key] = _merged(inner, value) if isinstance(value, Mapping) else value
    return merged
