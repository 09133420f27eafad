"""Conditions and numbers of the status, and the worst of several problems. Pure. Only transition
times hold a time, so that planning an unchanged cluster gives an equal status.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_api.plan.drain.draining import ordinal_of
from pdcluster_api.plan.observed.pools import PoolView, RoleView
from pdcluster_api.plan.observed.state import PodState, Previous, Problem
from pdcluster_schema import conditions as words
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.text import and_more, shortened
from pdcluster_schema.workload import Workload


@dataclass(frozen=True)
class Condition:
    """One condition without its times."""

    type: str
    status: str  # True, False, or Unknown
    reason: str
    message: str

    @classmethod
    def true(cls, kind: str, reason: str, message: str) -> "Condition":
        return cls(kind, "True", reason, message)

    @classmethod
    def false(cls, kind: str, reason: str, message: str) -> "Condition":
        return cls(kind, "False", reason, message)

    @classmethod
    def unknown(cls, kind: str, reason: str, message: str) -> "Condition":
        return cls(kind, "Unknown", reason, message)

    @classmethod
    def kept(cls, previous: Previous, kind: str) -> "Condition | None":
        """As it was written last; None = never, or by another writer."""
        before = previous.condition(kind)
        status, reason, message = (before.get(each) for each in ("status", "reason", "message"))
        if not isinstance(reason, str) or not isinstance(message, str):
            return None
        return cls(kind, status if status in ("True", "False") else "Unknown", reason, message)

    @property
    def is_true(self) -> bool:
        return self.status == "True"


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
    roles = [
        {
            "name": view.name,
            "desired": view.desired,
            "ready": view.ready,
            "pools": [
                {
                    "name": pool.declared.name,
                    "gpu": pool.declared.gpu,
                    "desired": pool.desired,
                    "current": pool.current,
                    "ready": pool.ready,
                    "updated": pool.updated,
                }
                for pool in view.pools
            ],
        }
        for view in views
    ]
    return {**columns, "roles": roles}


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


# Needs a user first, then help from outside, then time; NotAnswering only follows from others
_WORST_FIRST = (
    words.INVALID_SPEC,
    words.FORBIDDEN,
    words.NAME_TAKEN,
    words.APPLY_FAILED,
    words.PROGRESS_DEADLINE_EXCEEDED,
    words.CONFIGURATION_REFUSED,
    words.ACCELERATOR_UNUSABLE,
    words.IMAGE_NOT_PULLED,
    words.MODEL_NOT_DOWNLOADED,
    words.CRASH_LOOPING,
    words.ETCD_FULL,
    words.QUOTA_EXCEEDED,
    words.PODS_REFUSED,
    words.NODE_LOST,
    words.UNSCHEDULABLE,
    words.GROUP_RESTARTING,
    words.ETCD_UNREACHABLE,
    words.DOWNLOADING_MODEL,
    words.ROLLING_OUT,
    words.SCALING,
    words.STARTING,
    words.NOT_ANSWERING,
)


def rank(reason: str) -> int:
    return _WORST_FIRST.index(reason if reason in _WORST_FIRST else words.APPLY_FAILED)


def worst_of(problems: Iterable[Problem | None]) -> Problem | None:
    found = (problem for problem in problems if problem is not None)
    return min(found, key=lambda problem: (rank(problem.reason), problem), default=None)


def worst_problem(view: RoleView) -> Problem | None:
    """The worst problem of pools that are not ready; None = they are only on their way."""
    found = sorted(
        (rank(reason), name, reason, message, num_workers)
        for pool in view.pools
        if not pool.is_ready
        for name, reason, message, num_workers in _problems(pool)
    )
    if not found:
        return None
    _, _, reason, message, _ = found[0]
    affected = sum(num_workers for _, _, each, _, num_workers in found if each == reason)
    return Problem(reason, f"{affected} of {view.desired} workers: {message}")


def still_loading(view: RoleView) -> Iterator[str]:
    """The first pod whose stock engine has not served yet, in words, and how many more do so."""
    found = sorted(
        pod.loading
        for pool in view.pools
        for pod in (pool.target.pods if pool.target else ())
        if pod.loading and not pod.terminating and not _is_surplus(pod, pool)
    )
    if found:
        yield found[0] + and_more(len(found))


def _is_surplus(pod: PodState, pool: PoolView) -> bool:
    return ordinal_of(pod) >= pool.declared.num_pods


def _problems(pool: PoolView) -> Iterator[tuple[str, str, str, int]]:
    target = pool.target
    if target is None:
        return
    missing = pool.declared.num_pods - target.current
    if target.fault is not None and missing > 0:
        message = f"pool {pool.declared.name}: {target.fault.message}"
        yield target.id.name, target.fault.reason, message, missing
    for pod in target.pods:
        if pod.problem is None or pod.ready or _is_surplus(pod, pool):
            continue
        # a worker of several pods ends as a whole to start again
        if not pod.terminating or pod.problem.reason == words.GROUP_RESTARTING:
            yield pod.name, *pod.problem, 1
