"""Results of the planner: plain values, carried out by the operator.

ClusterPlan is whole: whatever of a cluster is not in it is to be removed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_schema.workload import PoolPair, Workload, WorkloadId


@dataclass(frozen=True)
class ScalerPlan:
    """One scaler as it should be.

    request: replicas to write together with `seen`; None = leave its spec alone, it is the user's
    status:  what /scale and HPA read
    """

    role: str
    pool: str
    seen: int
    request: int | None
    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedEvent:
    """Something worth an event on the PDCluster.  warning: of type Warning instead of Normal."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class DueVerification:
    """A pair to verify now.

    workers: ready decode workers, any of which can be asked
    request: value of the annotation, kept with the outcome
    even_if_busy: that value is new
    """

    pair: PoolPair
    revision: str
    workers: tuple[str, ...]
    request: str = ""
    even_if_busy: bool = False


@dataclass(frozen=True)
class ClusterPlan:
    """Desired state.

    serving:    the revision that the ingress Service selects
    serving_role: the role whose workers answer HTTP in that revision: decode or mixed
    workloads:  every StatefulSet that should exist, of all revisions, at the size that it may have
    ends_first: Recreate: delete the old StatefulSets in the foreground; create new ones once they
                are gone
    reports_first: the status must be written before anything follows it: it holds a new decision
                of the autoscaler, or how far a roll out will exceed the budget
    commands:   pods that get a drain command before StatefulSets are written; others lose theirs
    cut:        pods that go though they have not drained: their time is over
    budgets:    per serving workload, the number of its workers that a node drain leaves ready
    stale_records: pods that do not exist and whose records may be removed
    needs_worker_records: the plan depends on a fresh read of the worker records
    """

    serving: str
    serving_role: str
    workloads: tuple[Workload, ...]
    scalers: tuple[ScalerPlan, ...]
    ends_first: bool = False
    reports_first: bool = False
    commands: frozenset[str] = frozenset()
    cut: tuple[str, ...] = ()
    budgets: Mapping[WorkloadId, int] = field(default_factory=dict)
    stale_records: tuple[str, ...] = ()
    needs_worker_records: bool = False


@dataclass(frozen=True)
class StatusPlan:
    """The status that is to be written.

    status: the whole of it, conditions with their transition times included
    events: changes against the status before
    requeue_after_seconds: until a change is expected without an event; None = no sooner than the
                           resync
    verify: KV transfers to verify now
    """

    status: Mapping[str, Any]
    events: tuple[PlannedEvent, ...] = ()
    requeue_after_seconds: float | None = None
    verify: tuple[DueVerification, ...] = ()
