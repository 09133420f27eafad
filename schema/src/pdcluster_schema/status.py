"""`status` of a PDCluster, as the operator writes it, and the PDPoolScaler object."""

from typing import Annotated, Literal, Required, TypedDict

from annotated_types import MaxLen, MinLen

from pdcluster_schema.section import Crd
from pdcluster_schema.values import Replicas

Int32 = Annotated[int, Crd(format="int32")]
Time = Annotated[str, Crd(format="date-time")]


class ConditionStatus(TypedDict, total=False):
    """One condition."""

    type: Required[str]
    """Type of the condition."""
    status: Required[Literal["True", "False", "Unknown"]]
    """Status of the condition."""
    reason: Required[str]
    """Reason as one word."""
    message: Required[str]
    """Reason as text, with the fix."""
    lastTransitionTime: Required[Time]
    """Time of the last change of status."""
    observedGeneration: int
    """metadata.generation that it speaks of."""


class RefusedPairStatus(TypedDict, total=False):
    """One pair."""

    decode: Required[str]
    """Its decode worker."""
    prefill: Required[str]
    """Its prefill worker."""
    reason: Required[str]
    """Mismatch that the decode worker found, and the fix."""


class DisaggregationStatus(TypedDict, total=False):
    """Disaggregation between prefill and decode workers of the serving revision, by their records:
    figures of the last minutes with traffic. Absent of mixed workers.
    """

    transport: str
    """Transport that moved the last KV blocks; several, such as nixl,tcp, where pairs differ."""
    transportNote: str
    """Reason why a worker does not use the transport that engine.transport asks for."""
    remoteShare: str
    """Approximate share of long prompts that prefill workers computed, such as 85%."""
    bytesPerSecond: int
    """Approximate rate of the last KV transfer of a request, the median over prefill workers; a
    short prompt's is below that of the link.
    """
    numRefusedPairs: Int32
    """Pairs of workers between which no KV moves."""
    refusedPairs: Annotated[list[RefusedPairStatus], Crd(maxItems=8, list_type="atomic")]
    """The first of them."""


class TransferStatus(TypedDict, total=False):
    """One pair."""

    prefill: Required[str]
    """Its prefill pool."""
    decode: Required[str]
    """Its decode pool."""
    at: Required[Time]
    """Time of the end of its last verification."""
    fault: str
    """Fault of it in one word; absent if KV moved."""
    message: str
    """The fault in words."""
    prefillWorker: str
    """Prefill worker that was asked."""
    decodeWorker: str
    """Decode worker that was asked."""
    transport: str
    """Transport that moved the KV."""
    numBytes: int
    """Bytes of KV that arrived."""
    bytesPerSecond: int
    """Rate of this one transfer."""
    numTokens: Int32
    """Output tokens that were compared with those of a local prefill."""
    hasChecksum: bool
    """True where both engines summed up the blocks, and agree."""
    numFailures: Int32
    """Verifications in a row that did not pass."""
    request: str
    """Value of the annotation pdcluster.io/verify when it was verified."""


class TransfersStatus(TypedDict, total=False):
    """Verifications of KV transfers, of each prefill pool to each decode pool of the serving
    revision: the last one of each pair. Absent before the first.
    """

    revision: str
    """The revision of the pairs below."""
    pairs: Annotated[
        list[TransferStatus], Crd(maxItems=64, list_type="map", list_map_keys=["prefill", "decode"])
    ]
    """Pairs of pools that were verified."""


class PoolSizeStatus(TypedDict, total=False):
    """Workers of one pool."""

    role: Required[str]
    """prefill, decode, mixed, router or picker."""
    pool: Required[str]
    """Name of the pool in the spec."""
    replicas: Required[Int32]
    """Workers."""


class FlippedStatus(TypedDict, total=False):
    """Workers of a flexible pool that serve the other role."""

    role: Required[str]
    """Role of their pool, prefill or decode."""
    pool: Required[str]
    """Name of their pool."""
    servesPool: Required[str]
    """Pool of the other role, as one of whose workers they count."""
    workers: Required[Int32]
    """Number of them: the lowest ordinals of their StatefulSet."""
    statefulSet: str
    """Its name."""


class DecisionInputStatus(TypedDict, total=False):
    """One number."""

    subject: Required[str]
    """The role."""
    name: Required[str]
    """Name of the metric, with its unit."""
    value: float
    """Value that was read; left out = not known."""
    limit: float
    """Value that it was compared with."""


class DecisionStepStatus(TypedDict, total=False):
    """Effect of one rule on one role or pool."""

    rule: Required[str]
    """Name."""
    subject: Required[str]
    """A role; or a role and a pool with a slash between them."""
    before: Required[Int32]
    """Workers before it."""
    after: Required[Int32]
    """Workers after it."""
    why: Required[str]
    """Reason as text, with the numbers that it compared."""


class DecisionProblemStatus(TypedDict, total=False):
    """One problem."""

    reason: Required[str]
    """Reason as one word."""
    message: Required[str]
    """The problem as text."""


class DecisionStatus(TypedDict, total=False):
    """One decision."""

    at: Required[Time]
    """Time of the decision."""
    mode: str
    """spec.autoscale.mode then: On = it was carried out, Advise = it was shown."""
    replicas: Required[Annotated[list[PoolSizeStatus], Crd(list_type="atomic")]]
    """Workers of each pool by this decision."""
    flipped: Annotated[list[FlippedStatus], Crd(list_type="atomic")]
    """Those of them that serve the other role by it; left out without any."""
    inputs: Annotated[list[DecisionInputStatus], Crd(list_type="atomic")]
    """Metrics that it read."""
    steps: Annotated[list[DecisionStepStatus], Crd(list_type="atomic")]
    """Effect of each rule."""
    problems: Annotated[list[DecisionProblemStatus], Crd(list_type="atomic")]
    """Problems of the decision."""


class AutoscalingStatus(TypedDict, total=False):
    """Decisions of the autoscaler, while spec.autoscale.mode is Advise or On. With On, replicas is
    the record that sizes the pools: it is written before anything follows it.
    """

    mode: str
    """Mode of the decisions below."""
    replicas: Annotated[list[PoolSizeStatus], Crd(list_type="map", list_map_keys=["role", "pool"])]
    """Workers that each pool should have by the last decision, or would with Advise; those of them
    that serve the other role are in flipped.
    """
    flipped: Annotated[list[FlippedStatus], Crd(list_type="map", list_map_keys=["role", "pool"])]
    """Workers of flexible pools that serve the other role; left out without any."""
    lastDecisions: Annotated[list[DecisionStatus], Crd(maxItems=10, list_type="atomic")]
    """Decisions that changed something, the newest first; `pdctl why` shows them as a table."""


class PoolStatus(TypedDict, total=False):
    """One pool."""

    name: Required[str]
    """Name of the pool in the spec."""
    gpu: str
    """Type of accelerator."""
    desired: Int32
    """Workers that should be."""
    current: Int32
    """Workers that exist."""
    ready: Int32
    """Workers that answer."""
    updated: Int32
    """Workers of the revision that the spec asks for."""


class RoleStatus(TypedDict, total=False):
    """One role."""

    name: Required[str]
    """prefill, decode, mixed, router or picker."""
    desired: Int32
    """Workers that should be."""
    ready: Int32
    """Workers that answer."""
    pools: Annotated[list[PoolStatus], Crd(list_type="map", list_map_keys=["name"])]
    """Workers by pool."""


class RolloutStatus(TypedDict, total=False):
    """The roll out that is under way, or that has stalled; left out when there is none."""

    revision: str
    """The new revision; with the templates of roles that are replaced within one."""
    progressDeadlineSeconds: int
    """Value in the spec when the clock started; another value restarts it."""
    ready: Int32
    """Most workers of it that were ready at a time."""
    left: Int32
    """Fewest pods of the old revision that were left, where these have to end first."""
    progressedAt: Time
    """Time of the last progress; left out while the clock stands."""
    stalled: str
    """Reason why it makes no progress; left out while it does."""
    step: Int32
    """Step of strategy Rolling that is under way."""
    steps: Int32
    """Steps that it takes, by the present sizes of its pools."""
    givenUp: bool
    """It is scaled to 0, because the old revision answered requests when it stalled; left out
    otherwise.
    """


class GateStatus(TypedDict, total=False):
    """The gate of a rolling roll out, while it has any, is paused or was rolled back."""

    revision: str
    """The new revision, as in rollout."""
    steps: Int32
    """Steps of the roll out."""
    passed: Int32
    """Steps whose gate has passed."""
    state: str
    """Waiting = for workers of the step to be ready; Baking = they are; Failed; RolledBack."""
    since: Time
    """Time when that began; left out while it waits."""
    reason: str
    """Reason why it failed, or was rolled back; left out otherwise."""
    message: str
    """The same with its figures."""
    to: str
    """The revision that it was rolled back to."""
    toTemplates: dict[str, str]
    """Templates of that one's roles, by role, where they have any of their own."""


class ServedStatus(TypedDict, total=False):
    """One revision that has served with all its workers."""

    revision: Required[str]
    """The revision."""
    templates: dict[str, str]
    """Templates of its roles, by role, where they have any of their own."""
    since: Time
    """Time when all its workers were ready for the first time."""


class KeptStatus(TypedDict, total=False):
    """One StatefulSet."""

    name: Required[str]
    """Name."""
    replicas: Int32
    """Workers that it should have."""


class ClusterStatus(TypedDict, total=False):
    """Observed state; written by the operator alone."""

    observedGeneration: int
    """metadata.generation that this status speaks of; -1 = the operator has not seen the object."""
    conditions: Annotated[list[ConditionStatus], Crd(list_type="map", list_map_keys=["type"])]
    """Ready = all is as declared, and follows from DiscoveryReady, PrefillReady, DecodeReady
    (or MixedReady), RouterReady (with routers), PickerReady (with pickers) and IngressReady;
    Serving = requests are answered; DiscoveryInSync = the records in etcd are those of the
    pods, reported once etcd was read; Disaggregating = long prompts are prefilled by prefill
    workers, Unknown until there were some, absent of mixed workers; KVTransferVerified = KV was
    seen to move from each prefill pool to each decode pool, Unknown until then, absent of mixed
    workers; AcceleratorsInUse = workers compute on the accelerators that their pools reserve,
    absent without such a pool; KVTiersAvailable = the tiers below the KV blocks of ready
    workers take and give blocks, absent without engine.kvTiers; OtherModelsServed = the PDClusters
    of service.models serve them, absent without those. Reconciling and Stalled are there only while
    they are true, and so is what stands in the autoscaler's way: MetricsMissing,
    CapacityShort, RatioConstraintViolated, BudgetTooSmall, BoundsConflict and ScalingLimited;
    RolloutOverBudget = the revisions of a roll out need more accelerators than
    autoscale.budget, for which strategy Rolling waits; RolloutPaused = a roll out waits at a gate;
    RolledBack = the revision of the spec was given up, until the spec changes; False = an undo was
    asked for, and there is nothing to go back to.
    """
    revision: str
    """The revision that the spec asks for; while that is rolled back, the one before it."""
    servingRevision: str
    """The revision that answers requests."""
    endpoint: str
    """Address of the OpenAI API inside the Kubernetes cluster."""
    model: str
    """Name by which clients call the model."""
    prefill: str
    """Prefill workers as ready/desired."""
    decode: str
    """Decode (or mixed) workers as ready/desired."""
    router: str
    """Routers as ready/desired; absent without the role."""
    picker: str
    """Pickers as ready/desired; absent without the role."""
    disaggregation: DisaggregationStatus
    transfers: TransfersStatus
    autoscaling: AutoscalingStatus
    roles: Annotated[list[RoleStatus], Crd(list_type="map", list_map_keys=["name"])]
    """Workers by role."""
    rollout: RolloutStatus
    gate: GateStatus
    history: list[ServedStatus]
    """The last revision that has served with all its workers, and the one before it, to which
    `pdctl rollout undo` goes back.
    """
    kept: Annotated[list[KeptStatus], Crd(list_type="map", list_map_keys=["name"])]
    """StatefulSets that stay until others take their place, of the revision before or of pools that
    are no longer declared.
    """


ScalerName = Annotated[str, MinLen(1), MaxLen(63)]


class PoolScalerSpec(TypedDict):
    """The pool, and its desired number of workers."""

    cluster: ScalerName
    """Name of the PDCluster in this namespace."""
    role: Literal["prefill", "decode", "mixed", "router", "picker"]
    """Role of the pool."""
    pool: ScalerName
    """Name of the pool."""
    replicas: Replicas
    """Workers that are asked for; the pool's minReplicas and maxReplicas bound what is run."""


class PoolScalerStatus(TypedDict, total=False):
    """Observed state; written by the operator alone."""

    replicas: Int32
    """Workers that exist."""
    selector: str
    """Labels of the pool's pods, as HPA reads them."""
