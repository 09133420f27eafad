"""Conditions and numbers of the status. Pure. Only transition times hold a time, so that planning
an unchanged cluster gives an equal status.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_api.plan.observed.pools import PoolView, RoleView
from pdcluster_api.plan.observed.previous import Previous
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.text import shortened
from pdcluster_schema.workload import Workload


@dataclass(frozen=True)
class Condition:
    """One condition without its times.  is_unknown: it is neither true nor false yet"""

    type: str
    is_true: bool
    reason: str
    message: str
    is_unknown: bool = False

    @classmethod
    def true(cls, kind: str, reason: str, message: str) -> "Condition":
        return cls(kind, True, reason, message)

    @classmethod
    def false(cls, kind: str, reason: str, message: str) -> "Condition":
        return cls(kind, False, reason, message)

    @classmethod
    def unknown(cls, kind: str, reason: str, message: str) -> "Condition":
        return cls(kind, False, reason, message, is_unknown=True)

    @classmethod
    def kept(cls, previous: Previous, kind: str) -> "Condition | None":
        """As it was written last; None = never, or by another writer."""
        before = previous.condition(kind)
        status, reason, message = (before.get(each) for each in ("status", "reason", "message"))
        if not isinstance(reason, str) or not isinstance(message, str):
            return None
        is_unknown = status not in ("True", "False")
        return cls(kind, status == "True", reason, message, is_unknown)

    @property
    def status(self) -> str:
        return "Unknown" if self.is_unknown else str(self.is_true)


Status = dict[str, Any]
MAX_MESSAGE = 1024  # characters; the schema holds more, a reader does not


def identity_fields(cluster: PDCluster, *, revision: str, serving: str) -> Status:
    metadata = cluster.metadata
    return {
        "model": cluster.spec.model.name,
        "endpoint": f"http://{metadata.name}.{metadata.namespace}.svc:{cluster.spec.service.port}/v1",
        "revision": revision,
        "servingRevision": serving,
    }


def number_fields(views: Sequence[RoleView]) -> Status:
    """Workers by role and pool, and the columns of `kubectl get`; mixed in that of decode."""
    columns = {
        ("decode" if view.name == "mixed" else view.name): f"{view.ready}/{view.desired}"
        for view in views
    }
    return {**columns, "roles": [_role(view) for view in views]}


def kept_field(kept: Iterable[Workload]) -> Status:
    """Workloads that stay until others take their place, with their sizes; no field without any."""
    entries = [{"name": workload.id.name, "replicas": workload.replicas} for workload in kept]
    return {"kept": entries} if entries else {}


def dated(
    found: Iterable[Condition], previous: Previous, *, generation: int, now: str
) -> list[Status]:
    """Conditions of the API.  now: RFC 3339, the time of those whose status changes."""
    return [
        {
            "type": condition.type,
            "status": condition.status,
            "reason": condition.reason,
            "message": shortened(condition.message, MAX_MESSAGE),
            "lastTransitionTime": _since(condition, previous.condition(condition.type), now),
            "observedGeneration": generation,
        }
        for condition in found
    ]


def _since(condition: Condition, before: Mapping[str, Any], now: str) -> str:
    since = before.get("lastTransitionTime")
    return since if isinstance(since, str) and before.get("status") == condition.status else now


def _role(view: RoleView) -> Status:
    return {
        "name": view.name,
        "desired": view.desired,
        "ready": view.ready,
        "pools": [_pool(pool) for pool in view.pools],
    }


def _pool(pool: PoolView) -> Status:
    return {
        "name": pool.declared.name,
        "gpu": pool.declared.gpu,
        "desired": pool.desired,
        "current": pool.current,
        "ready": pool.ready,
        "updated": pool.updated,
    }
