"""Results of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdcluster_api.plan.observed.state import Flipped
from pdcluster_schema.workload import PoolPair, Workload, WorkloadId


@dataclass(frozen=True)
class ScalerPlan:
    role: str
    pool: str
    seen: int
    # replicas to write together with `seen`; None = leave its spec alone, it is the user's
    request: int | None
    status: Mapping[str, Any] = field(default_factory=dict)  # what /scale and HPA read


@dataclass(frozen=True)
class PlannedEvent:
    """Something worth an event on the PDCluster.  warning: of type Warning instead of Normal."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class DueVerification:
    """A pair to verify now."""

    pair: PoolPair
    revision: str
    workers: tuple[str, ...]  # ready decode workers, any of which can be asked
    request: str = ""  # value of the annotation, kept with the outcome
    even_if_busy: bool = False  # that value is new


@dataclass(frozen=True)
class ClusterPlan:
    serving: str  # the revision that the ingress Service selects
    serving_role: str  # the role whose workers answer HTTP in that revision: decode or mixed
    # the Service selects workers of every revision
    is_wide: bool = field(default=False, kw_only=True)
    # every StatefulSet that should exist, of all revisions, at the size that it may have
    workloads: tuple[Workload, ...]
    scalers: tuple[ScalerPlan, ...]
    # workloads of an earlier revision of which the snapshot alone stays
    retired: tuple[WorkloadId, ...] = ()
    # Recreate: delete the old StatefulSets in the foreground; create new ones once they are gone
    ends_first: bool = False
    # the status must be written before anything follows it: it holds a new decision of the
    # autoscaler, or how far a roll out will exceed the budget
    reports_first: bool = False
    # pods that get a drain command before StatefulSets are written; others lose theirs
    commands: frozenset[str] = frozenset()
    # seconds from SIGTERM on of ending pods that have fewer than usual
    graces: Mapping[str, int] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)  # commands to have another role, by pod
    flipped: Flipped | None = None  # workers that should serve the other role
    cut: tuple[str, ...] = ()  # pods that go though they have not drained: their time is over
    # per serving workload, the number of its workers that a node drain leaves ready
    budgets: Mapping[WorkloadId, int] = field(default_factory=dict)
    stale_records: tuple[str, ...] = ()  # pods that do not exist and whose records may be removed
    needs_worker_records: bool = False  # the plan depends on a fresh read of the worker records


@dataclass(frozen=True)
class StatusPlan:
    status: Mapping[str, Any]  # the whole of it, conditions with their transition times included
    events: tuple[PlannedEvent, ...] = ()  # changes against the status before
    # until a change is expected without an event; None = no sooner than the resync
    requeue_after_seconds: float | None = None
    verify: tuple[DueVerification, ...] = ()  # KV transfers to verify now
