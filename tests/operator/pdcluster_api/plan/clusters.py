"""Small PDClusters and observations, with what a test does not care about filled in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdcluster_api.plan.cluster import desired_state, plan_cluster
from pdcluster_api.plan.cluster_status import plan_status
from pdcluster_api.plan.observed.state import (
    DiscoveryState,
    Observed,
    PodState,
    Problem,
    ScalerState,
    WorkloadState,
)
from pdcluster_api.plan.result import ClusterPlan, StatusPlan
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDCluster
from pdcluster_schema.revision import revision_of
from pdcluster_schema.workload import WorkloadId
from tests.operator.pods import pod_state

NOW = "2026-01-02T03:04:05Z"
LATER = "2026-01-02T04:00:00Z"
ETCD_READY = DiscoveryState(managed=True, ready=1, desired=1)

Pools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Planned:
    """One plan with the status that follows; it has the fields of both."""

    plan: ClusterPlan
    report: StatusPlan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.report if hasattr(self.report, name) else self.plan, name)


def plan_all(cluster: PDCluster, observed: Observed, now: str) -> Planned:
    desired = desired_state(cluster, observed, now)
    return Planned(plan_cluster(desired), plan_status(desired))


def pool(replicas: int, name: str = "cpu", **fields: Any) -> dict[str, Any]:
    return {"name": name, "replicas": replicas, **fields}


ONE = (pool(1),)
TWO = (pool(2),)


def make_cluster(
    *,
    prefill: Pools = ONE,
    decode: Pools = TWO,
    mixed: Pools = (),
    engine: int = 64,
    strategy: str = "BlueGreen",
    routers: int = 0,
    of_role: Mapping[str, int] | None = None,
) -> PDCluster:
    """A cluster called chat.  engine: its maxSequences, so that another number is another revision;
    of_role: that of roles with one of their own; mixed: instead of the other roles.
    """
    roles = {"mixed": mixed} if mixed else {"prefill": prefill, "decode": decode}
    if routers:
        roles["router"] = [pool(routers)]
    own = {role: {"engine": {"maxSequences": number}} for role, number in (of_role or {}).items()}
    spec = {
        "model": {"name": "tiny", "path": "/models/tiny"},
        "roles": {
            role: {"pools": [dict(each) for each in pools], **own.get(role, {})}
            for role, pools in roles.items()
        },
        "engine": {"maxSequences": engine},
        "rollout": {"strategy": strategy},
    }
    return parse(
        {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": "chat"},
            "spec": spec,
        }
    )


def identity(revision: str, role: str = "decode", name: str = "cpu") -> WorkloadId:
    return WorkloadId("chat", role, name, revision)


def workload(
    of: WorkloadId, desired: int, ready: int | None = None, **fields: Any
) -> WorkloadState:
    """A StatefulSet with all its pods; ready: None = every one."""
    fields = {"current": desired, "updated": desired, **fields}
    return WorkloadState(of, desired, ready=desired if ready is None else ready, **fields)


def failing_pod(of: WorkloadId, ordinal: int, reason: str, message: str = "it fails") -> PodState:
    name = f"{of.name}-{ordinal}"
    return pod_state(of, ordinal, ready=False, problem=Problem(reason, f"pod {name}: {message}"))


def running(cluster: PDCluster, **fields: Any) -> Observed:
    """All as declared, on the first look after a status was never written."""
    revision = revision_of(cluster.spec)
    pools = [
        (role, each) for role, spec in cluster.spec.roles.present().items() for each in spec.pools
    ]
    return Observed(
        **{
            "generation": 1,
            "status": {},
            "discovery": ETCD_READY,
            "workloads": [
                workload(identity(revision, role, each.name), each.replicas) for role, each in pools
            ],
            "scalers": [
                ScalerState(role, each.name, each.replicas, each.replicas) for role, each in pools
            ],
            "service_revision": revision,
            **fields,
        }
    )


def condition_of(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of a type; empty when there is none."""
    return next((each for each in status["conditions"] if each["type"] == kind), {})
