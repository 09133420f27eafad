"""Inputs of the planner: plain values, made by `apiserver` and by the operator.

Observed is one look at the API server (through the watch cache) and at etcd.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdcluster_api.plan.observed.decision import ScalingDecision
from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema.workload import PoolPair, WorkloadId


@dataclass(frozen=True)
class PairVerification:
    """One that has ended, with KV that moved or a fault.

    revision: of its workers
    at:       RFC 3339, when it ended
    request:  value of the annotation that asked for it; empty = none did
    fault:    as the worker calls it (docs/contracts.md); None = it passed; message: why, in words
    decode_worker, prefill_worker: pods; the second is empty where none was reached
    """

    revision: str
    at: str
    request: str = ""
    fault: str | None = None
    message: str = ""
    decode_worker: str = ""
    prefill_worker: str = ""
    transport: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    bytes_per_second: int = 0
    has_checksum: bool = False


@dataclass(frozen=True)
class PairVerifications:
    """Newest outcomes since the operator began.

    ended: the last verification of a pair
    waits: why nothing is known of a pair that was asked for since: it is busy, or does not answer
    """

    ended: Mapping[PoolPair, PairVerification] = field(default_factory=dict)
    waits: Mapping[PoolPair, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PodState:
    """One worker pod.

    problem: why it is not ready; None while it is ready or just starting
    node:    that it is bound to; empty = none yet
    started: its worker runs and has been ready since it began: one that drains is not ready any
             more, and still serves
    gpu:     type of accelerator that it was made for; empty = unknown
    gpus_per_replica: number of its accelerators; 0 = unknown
    since:   RFC 3339; of a terminating one: when it has to be gone, its grace period included;
             of another: since when it is not ready; None = it is ready, or unknown
    loading: that its stock engine runs and has not served yet, and what shows why; empty = it has
             none, or that serves
    """

    name: str
    workload: WorkloadId
    ready: bool
    terminating: bool
    problem: Problem | None = None
    node: str = ""
    started: bool = False
    gpu: str = ""
    since: str | None = None
    loading: str = ""
    gpus_per_replica: int = 0

    def __str__(self) -> str:
        return str(self.ending)

    @property
    def ending(self) -> "EndingPod":
        """The part that counts while it ends."""
        return EndingPod(self.name, self.node, self.since)


@dataclass(frozen=True)
class EndingPod:
    """A terminating pod.

    node:  that it is bound to; empty = none
    since: RFC 3339, when it has to be gone, its grace period included; None = unknown
    """

    name: str
    node: str = ""
    since: str | None = None

    def __str__(self) -> str:
        return f"pod {self.name} on node {self.node}" if self.node else f"pod {self.name}"


@dataclass(frozen=True)
class WorkloadState:
    """One StatefulSet as it is.

    desired: spec.replicas; current: pods that exist; ready: pods that are ready; updated: pods of
             its newest template
    fault:   problem that keeps its pods from being created (a quota, an admission webhook)
    gone:    the StatefulSet is deleted or being deleted, and only its pods are left to end
    gpu:     type of accelerator, as the workload's snapshot or else its pods have it; empty =
             unknown
    gpus_per_replica: accelerators of a worker, by the same; 0 = unknown
    """

    id: WorkloadId
    desired: int
    current: int
    ready: int
    updated: int
    gone: bool = False
    fault: Problem | None = None
    pods: tuple[PodState, ...] = ()
    gpu: str = ""
    gpus_per_replica: int = 0

    @property
    def num_pods(self) -> int:
        """Number of pods: its own count may be ahead of the pods that are known, or behind."""
        return max(self.current, len(self.pods))


@dataclass(frozen=True)
class ScalerState:
    """One PDPoolScaler as it is.

    seen:   the pool's `replicas` that was last taken over (annotation SEEN_REPLICAS); None =
            unreadable
    writer: the other manager that wrote its replicas last; None = we did, or unknown
    """

    role: str
    pool: str
    replicas: int
    seen: int | None
    writer: str | None = None


@dataclass(frozen=True)
class DiscoveryState:
    """The etcd of a cluster.

    managed: run by us, with `ready` of `desired` members
    error:   why it cannot be used; None = it answers
    problem: why a member that we run is not ready; None = it is just starting
    is_full: it takes no writes, since it has no room
    in_memory: it is run by us without storage
    ending:  terminating pods of the one that we run
    """

    managed: bool
    ready: int = 0
    desired: int = 0
    error: str | None = None
    problem: Problem | None = None
    is_full: bool = False
    in_memory: bool = False
    ending: tuple[EndingPod, ...] = ()


@dataclass(frozen=True)
class WorkerDevice:
    """Device of one worker, by its record.

    kind: cpu or cuda; of a stock engine also rocm, tpu, xpu, or unknown
    name: of the processor or the accelerator
    note: what a user must know of computing on it, or why it is unknown; empty = nothing
    """

    kind: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class WorkerDisaggregation:
    """Disaggregation of one worker, by its record.

    transport:        that moves KV blocks
    refused:          prefill workers that it may not use, as (pod, reason), the first few;
                      num_refused: all of them
    long_prompts:     about how many prompts lately were worth a remote prefill; remote_ratio:
                      the share that got one
    bytes_per_second: about what its last KV transfer reached; 0 = it has sent none
    transport_note:   why not the transport that engine.transport asks for; empty = it did
    """

    transport: str
    refused: tuple[tuple[str, str], ...] = ()
    num_refused: int = 0
    long_prompts: int = 0
    remote_ratio: float | None = None
    bytes_per_second: int = 0
    transport_note: str = ""


@dataclass(frozen=True)
class WorkerRecords:
    """Worker records and drain commands of a cluster, from etcd.

    states:   starting, ready, draining or drained, of every registered worker, by pod
    devices:  devices of the workers that report one, by pod
    commands: pods with a drain command
    requested: seconds since it was first wanted that a pod drains, by pod
    mismatched: seconds since a record first had no pod, or a pod that is ready or has started no
              record, by pod
    disaggregation: of those that report it, by pod
    error:    why etcd cannot be asked now, and nothing is known but `requested`; None = it answers
    again_seconds: with an error: after which it is asked again
    """

    states: Mapping[str, str] = field(default_factory=dict)
    commands: frozenset[str] = frozenset()
    requested: Mapping[str, float] = field(default_factory=dict)
    mismatched: Mapping[str, float] = field(default_factory=dict)
    disaggregation: Mapping[str, WorkerDisaggregation] = field(default_factory=dict)
    error: str | None = None
    again_seconds: float | None = None
    devices: Mapping[str, WorkerDevice] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteFailure:
    """A request that the API server refused in the last reconcile.

    reason: of `schema.conditions`
    waits:  it was not even made, since another one failed
    """

    object: str
    reason: str
    message: str
    waits: bool = False


@dataclass(frozen=True)
class Observed:
    """A cluster as it is.

    generation:       of the PDCluster
    status:           its status as last written; empty at first
    service_revision: the revision whose pods the ingress Service selects; None = no such Service
                      yet
    service_role:     their role; None likewise
    records:          workloads with a snapshot (a ControllerRevision), from which a lost
                      StatefulSet can be made again
    failures:         writes that the API server refused in the last reconcile
    key_fault:        problem of the API keys' Secret; None = there is a key, or no Secret is named
    decision:         decision of the autoscaler in this reconcile; None = no new numbers, or off
    worker_records:         worker records; None = not read yet
    budgets:          pods that each disruption budget leaves ready, by its name
    verify_request:   value of the annotation pdcluster.io/verify; empty = none
    verifications:    of KV transfers, since the operator began
    """

    generation: int
    status: Mapping[str, Any]
    discovery: DiscoveryState
    workloads: Sequence[WorkloadState] = ()
    scalers: Sequence[ScalerState] = ()
    service_revision: str | None = None
    service_role: str | None = None
    records: Sequence[WorkloadId] = ()
    failures: Sequence[WriteFailure] = ()
    key_fault: Problem | None = None
    worker_records: WorkerRecords | None = None
    decision: ScalingDecision | None = None
    budgets: Mapping[str, int] = field(default_factory=dict)
    verify_request: str = ""
    verifications: PairVerifications = field(default_factory=PairVerifications)
