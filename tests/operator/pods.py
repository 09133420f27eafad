"""Pods of tests: as plans know them, and as the API server sends them."""

from collections.abc import Iterable
from typing import Any

from pdcluster_api.plan.observed.state import PodState
from pdcluster_schema.labels import workload_labels
from pdcluster_schema.workload import WorkloadId
from tests.operator.bodies import Body, child


def pod_state(of: WorkloadId, name: str | int, /, **fields: Any) -> PodState:
    """A pod of a workload, by name or ordinal; ready and not terminating, but for `fields`."""
    named = f"{of.name}-{name}" if isinstance(name, int) else name
    return PodState(
        **{"name": named, "workload": of, "ready": True, "terminating": False, **fields}
    )


def pod_states(
    of: WorkloadId, names: Iterable[str | int], /, **fields: Any
) -> tuple[PodState, ...]:
    """Pods of a workload that are alike."""
    return tuple(pod_state(of, name, **fields) for name in names)


def pod_body(name: str, version: int = 1, *, owner: str = "x", **parts: Any) -> Body:
    """A pod of the cluster, whose owner is a StatefulSet."""
    controller = {
        "kind": "StatefulSet",
        "name": owner,
        "uid": f"uid-of-{owner}",
        "controller": True,
    }
    metadata = {"ownerReferences": [controller], **parts.pop("metadata", {})}
    return child("Pod", name, version, **parts, metadata=metadata)


def worker_body(
    of: WorkloadId, ordinal: int = 0, *, status: Body | None = None, **metadata: Any
) -> Body:
    """A pod of a workload, with its labels."""
    marks = workload_labels(of.cluster, of.role, of.pool, of.revision, of.template)
    return pod_body(
        f"{of.name}-{ordinal}",
        owner=of.name,
        metadata={"labels": marks, **metadata},
        status=status or {},
    )
