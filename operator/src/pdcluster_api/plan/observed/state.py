"""Inputs of the planner: one look at the API server (through the watch cache) and at etcd."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pdcluster_schema.workload import PoolKey, PoolPair, WorkloadId


class Problem(NamedTuple):
    """An obstacle, for a condition.  reason: of `pdcluster_schema.conditions`."""

    reason: str
    message: str


_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class DecisionStep:
    rule: str  # its name, one of `rules`
    subject: str  # `prefill`, `decode`, `mixed` or `prefill/b200`
    before: int  # replicas
    after: int
    why: str  # as text, with the numbers that it compared


@dataclass(frozen=True)
class DecisionInput:
    subject: str
    name: str  # of the metric
    value: float | None  # with its unit in the name
    limit: float | None = None  # its threshold


@dataclass(frozen=True)
class Flipped:
    """Workers of a flexible pool that serve as those of the other one: its lowest ordinals."""

    home: PoolKey
    to: PoolKey
    workers: int

    def away(self, key: PoolKey) -> int:
        """Workers of a pool that serve the other role; negative = those of the other pool here."""
        return {self.home: self.workers, self.to: -self.workers}.get(key, 0)


@dataclass(frozen=True)
class ScalingDecision:
    """The replicas of every pool, how they came about, what stood in the way, and when it was."""

    replicas: Mapping[PoolKey, int]
    inputs: tuple[DecisionInput, ...] = ()
    steps: tuple[DecisionStep, ...] = ()
    problems: tuple[Problem, ...] = ()
    at: datetime = _NEVER
    flipped: Flipped | None = None  # None = each worker serves as one of its pool

    def serving(self, key: PoolKey) -> int:
        return self.replicas[key] - (self.flipped.away(key) if self.flipped else 0)


@dataclass(frozen=True)
class PairVerification:
    """A verification that has ended, with KV that moved or a fault."""

    revision: str  # of its workers
    at: str  # RFC 3339, when it ended
    request: str = ""  # value of the annotation that asked for it; empty = none did
    fault: str | None = None  # as the worker calls it (docs/contracts.md); None = it passed
    message: str = ""  # why, in words
    decode_worker: str = ""  # pods; the second is empty where none was reached
    prefill_worker: str = ""
    transport: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    bytes_per_second: int = 0
    has_checksum: bool = False


@dataclass(frozen=True)
class PairVerifications:
    """Newest outcomes since the operator began."""

    # the last verification of a pair
    ended: Mapping[PoolPair, PairVerification] = field(default_factory=dict)
    # why nothing is known of a pair that was asked for since: it is busy, or does not answer
    waits: Mapping[PoolPair, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RevisionLatency:
    """A latency of two revisions in one time.  None = too few samples"""

    name: str  # of the metric, with its percentile
    objective: float  # seconds
    new: float | None
    old: float | None


@dataclass(frozen=True)
class Attainment:
    """Latencies of a new revision beside the old one's, while its gate bakes."""

    num_requests: int = 0  # of the new one
    latencies: tuple[RevisionLatency, ...] = ()
    # RFC 3339, from which they are counted where that is not the begin of the gate's time
    counted_since: str = ""


@dataclass(frozen=True)
class PodState:
    name: str
    workload: WorkloadId
    ready: bool
    terminating: bool
    problem: Problem | None = None  # why it is not ready; None while it is ready or just starting
    node: str = ""  # that it is bound to; empty = none yet
    # its worker runs and has been ready since it began: one that drains is not ready any more, and
    # still serves
    started: bool = False
    gpu: str = ""  # type of accelerator that it was made for; empty = unknown
    # RFC 3339; of a terminating one: when it has to be gone, its grace period included; of another:
    # since when it is not ready; None = it is ready, or unknown
    since: str | None = None
    # that its stock engine runs and has not served yet, and what shows why; empty = it has none, or
    # that serves
    loading: str = ""
    gpus_per_replica: int = 0  # number of its accelerators; 0 = unknown
    # of a terminating one, from SIGTERM to SIGKILL; None = as long as its template says
    grace_seconds: int | None = None
    # of a worker of several pods, the one that has to be gone first; None = it is a pod itself
    first_ending: "EndingPod | None" = None

    def __str__(self) -> str:
        return str(self.ending)

    @property
    def ending(self) -> "EndingPod":
        return self.first_ending or EndingPod(self.name, self.node, self.since)


@dataclass(frozen=True)
class EndingPod:
    name: str
    node: str = ""  # that it is bound to; empty = none
    # RFC 3339, when it has to be gone, its grace period included; None = unknown
    since: str | None = None

    def __str__(self) -> str:
        return f"pod {self.name} on node {self.node}" if self.node else f"pod {self.name}"


@dataclass(frozen=True)
class WorkloadState:
    id: WorkloadId
    desired: int  # spec.replicas
    current: int  # pods that exist
    ready: int  # pods that are ready
    updated: int  # pods of its newest template
    # the StatefulSet is deleted or being deleted, and only its pods are left to end
    gone: bool = False
    # problem that keeps its pods from being created (a quota, an admission webhook)
    fault: Problem | None = None
    pods: tuple[PodState, ...] = ()
    # type of accelerator, as the workload's snapshot or else its pods have it; empty = unknown
    gpu: str = ""
    gpus_per_replica: int = 0  # accelerators of a worker, by the same; 0 = unknown
    # of a flexible pool: its pods that serve the other role, and those of the other pool that serve
    # this one; `ready` is without the first and with the second
    away: frozenset[str] = frozenset()
    guests: tuple[PodState, ...] = ()

    @property
    def serving_pods(self) -> tuple[PodState, ...]:
        return (*(pod for pod in self.pods if pod.name not in self.away), *self.guests)

    @property
    def num_away(self) -> int:
        """Pods that serve the other role, less those of the other pool that serve this one."""
        return len(self.away) - len(self.guests)

    @property
    def num_pods(self) -> int:
        """Number of pods: its own count may be ahead of the pods that are known, or behind."""
        return max(self.current, len(self.pods))


@dataclass(frozen=True)
class ScalerState:
    role: str
    pool: str
    replicas: int
    # the pool's `replicas` that was last taken over (annotation SEEN_REPLICAS); None = unreadable
    seen: int | None
    # the other manager that wrote its replicas last; None = we did, or unknown
    writer: str | None = None


@dataclass(frozen=True)
class DiscoveryState:
    managed: bool  # run by us, with `ready` of `desired` members
    ready: int = 0
    desired: int = 0
    error: str | None = None  # why it cannot be used; None = it answers
    # why a member that we run is not ready; None = it is just starting
    problem: Problem | None = None
    is_full: bool = False  # it takes no writes, since it has no room
    in_memory: bool = False  # it is run by us without storage
    ending: tuple[EndingPod, ...] = ()  # terminating pods of the one that we run


@dataclass(frozen=True)
class WorkerDevice:
    kind: str  # cpu or cuda; of a stock engine also rocm, tpu, xpu, or unknown
    name: str  # of the processor or the accelerator
    # what a user must know of computing on it, or why it is unknown; empty = nothing
    note: str = ""
    engine_note: str = ""  # what a user must know of a stock engine's version; empty = nothing


@dataclass(frozen=True)
class WorkerDisaggregation:
    transport: str  # that moves KV blocks
    # prefill workers that it may not use, as (pod, reason), the first few
    refused: tuple[tuple[str, str], ...] = ()
    num_refused: int = 0  # all of them
    long_prompts: int = 0  # about how many prompts lately were worth a remote prefill
    remote_ratio: float | None = None  # the share that got one
    bytes_per_second: int = 0  # about what its last KV transfer reached; 0 = it has sent none
    transport_note: str = ""  # why not the transport that engine.transport asks for; empty = it did


StoppedTiers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WorkerRecords:
    """Worker records and drain commands of a cluster, from etcd."""

    # starting, ready, draining or drained, of every registered worker, by pod
    states: Mapping[str, str] = field(default_factory=dict)
    commands: frozenset[str] = frozenset()  # pods with a drain command
    # seconds since it was first wanted that a pod drains, by pod
    requested: Mapping[str, float] = field(default_factory=dict)
    # seconds since a record first had no pod, or a pod that is ready or has started no record, by
    # pod
    mismatched: Mapping[str, float] = field(default_factory=dict)
    # of those that report it, by pod
    disaggregation: Mapping[str, WorkerDisaggregation] = field(default_factory=dict)
    # why etcd cannot be asked now, and nothing is known but `requested`; None = it answers
    error: str | None = None
    again_seconds: float | None = None  # with an error: after which it is asked again
    # devices of the workers that report one, by pod
    devices: Mapping[str, WorkerDevice] = field(default_factory=dict)
    # (tier of KV, why it does not work) of the workers that have any, by pod
    stopped_tiers: Mapping[str, StoppedTiers] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)  # that pods are commanded to have
    # that workers have by such a command, by pod; another registered one has that of its pod
    serves: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteFailure:
    """A request that the API server refused in the last reconcile."""

    object: str
    reason: str  # of `pdcluster_schema.conditions`
    message: str
    waits: bool = False  # it was not even made, since another one failed


@dataclass(frozen=True)
class OtherCluster:
    """Another PDCluster of the namespace: names of its model and adapters, the port of its Service,
    whether it answers requests, and the Secret of its API keys; None = it wants no key.
    """

    models: tuple[str, ...]
    port: int
    is_serving: bool
    api_key_secret: str | None = None


@dataclass(frozen=True)
class Observed:
    generation: int  # of the PDCluster
    status: Mapping[str, Any]  # its status as last written; empty at first
    discovery: DiscoveryState
    workloads: Sequence[WorkloadState] = ()
    scalers: Sequence[ScalerState] = ()
    # the revision whose pods the ingress Service selects; None = no such Service yet
    service_revision: str | None = None
    service_role: str | None = None  # their role; None likewise
    # it selects workers of every revision, while one replaces another step by step; the revision
    # above is then the one that serves by the last status
    service_is_wide: bool = False
    # workloads with a snapshot (a ControllerRevision), from which a lost StatefulSet can be made
    # again
    records: Sequence[WorkloadId] = ()
    # those of which the snapshot alone is kept, to go back to
    retired: Sequence[WorkloadId] = ()
    # writes that the API server refused in the last reconcile
    failures: Sequence[WriteFailure] = ()
    # problem of the API keys' Secret; None = there is a key, or no Secret is named
    key_fault: Problem | None = None
    worker_records: WorkerRecords | None = None  # worker records; None = not read yet
    # decision of the autoscaler in this reconcile; None = no new numbers, or off
    decision: ScalingDecision | None = None
    # latencies since the gate of a roll out bakes; None = it asks for none
    attainment: Attainment | None = None
    # pods that each disruption budget leaves ready, by its name
    budgets: Mapping[str, int] = field(default_factory=dict)
    verify_request: str = ""  # value of the annotation pdcluster.io/verify; empty = none
    rollout_command: str = ""  # value of the annotation pdcluster.io/rollout; empty = none
    # of KV transfers, since the operator began
    verifications: PairVerifications = field(default_factory=PairVerifications)
    # since when nodes of pods that end are lost, by name; none = not looked at, without the right
    lost_nodes: Mapping[str, str] = field(default_factory=dict)
    # PDClusters that service.models names and that are there, by name
    others: Mapping[str, OtherCluster] = field(default_factory=dict)


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
        return mappings(self._status.get("conditions"))

    def reason(self, kind: str) -> str | None:
        return self.condition(kind).get("reason")

    def is_true(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    def pools(self) -> Mapping[PoolKey, tuple[str, int]]:
        """(gpu, desired workers) by role and pool, in their order."""
        return {
            (role["name"], pool["name"]): (str(pool.get("gpu", "")), pool["desired"])
            for role in mappings(self._status.get("roles"))
            for pool in mappings(role.get("pools"))
            if "name" in role and "name" in pool and isinstance(pool.get("desired"), int)
        }

    def mapping(self, field: str) -> Mapping[str, Any]:
        value = self._status.get(field)
        return value if isinstance(value, Mapping) else {}

    def kept(self) -> Mapping[str, int]:
        """Size of each workload that stays until others take its place, by its name."""
        entries = mappings(self._status.get("kept"))
        return {
            str(entry["name"]): entry["replicas"]
            for entry in entries
            if "name" in entry and isinstance(entry.get("replicas"), int)
        }


def mappings(value: object) -> Sequence[Mapping[str, Any]]:
    return (
        [entry for entry in value if isinstance(entry, Mapping)]
        if isinstance(value, Sequence)
        else []
    )
