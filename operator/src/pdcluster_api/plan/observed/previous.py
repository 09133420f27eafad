"""The status as it was last written, read with care: any writer may have changed it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdcluster_schema.workload import PoolKey


class Previous:
    """Fields of the last status; one that is missing or of another type counts as never written."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def text(self, field: str) -> str | None:
        value = self._status.get(field)
        return value if isinstance(value, str) and value else None

    def condition(self, kind: str) -> Mapping[str, Any]:
        return next((entry for entry in self.conditions() if entry.get("type") == kind), {})

    def conditions(self) -> Sequence[Mapping[str, Any]]:
        return _mappings(self._status.get("conditions"))

    def reason(self, kind: str) -> str | None:
        return self.condition(kind).get("reason")

    def is_true(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    def pools(self) -> Mapping[PoolKey, tuple[str, int]]:
        """(gpu, desired workers) by role and pool, in their order."""
        return {
            (role["name"], pool["name"]): (str(pool.get("gpu", "")), pool["desired"])
            for role in _mappings(self._status.get("roles"))
            for pool in _mappings(role.get("pools"))
            if "name" in role and "name" in pool and isinstance(pool.get("desired"), int)
        }

    def mapping(self, field: str) -> Mapping[str, Any]:
        value = self._status.get(field)
        return value if isinstance(value, Mapping) else {}

    def kept(self) -> Mapping[str, int]:
        """Size of each workload that stays until others take its place, by its name."""
        entries = _mappings(self._status.get("kept"))
        return {
            str(entry["name"]): entry["replicas"]
            for entry in entries
            if "name" in entry and isinstance(entry.get("replicas"), int)
        }


def _mappings(value: object) -> Sequence[Mapping[str, Any]]:
    return (
        [entry for entry in value if isinstance(entry, Mapping)]
        if isinstance(value, Sequence)
        else []
    )
