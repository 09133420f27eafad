"""Condition types and their reasons: every word that status and events may use.

Ready = all is as declared, and follows from the role, discovery and ingress
conditions below it; AcceleratorsInUse = workers compute on what their pools reserve,
where a pool has an accelerator; KVTiersAvailable = the tiers below the KV blocks of
workers take and give blocks, where there are any; OtherModelsServed = the clusters of
service.models serve them, where there are any; Serving = requests are answered;
DiscoveryInSync = the records in etcd are those of the pods, once etcd was asked;
Disaggregating = long prompts are prefilled by prefill workers, where there are any;
KVTransferVerified = KV was seen to move between their pools.  Reconciling and Stalled are
there only while they are true, as kstatus wants them.
"""

from typing import Final

READY: Final = "Ready"
SERVING: Final = "Serving"
DISCOVERY_READY: Final = "DiscoveryReady"
PREFILL_READY: Final = "PrefillReady"
DECODE_READY: Final = "DecodeReady"
MIXED_READY: Final = "MixedReady"
ROUTER_READY: Final = "RouterReady"
PICKER_READY: Final = "PickerReady"
INGRESS_READY: Final = "IngressReady"
DISCOVERY_IN_SYNC: Final = "DiscoveryInSync"
ACCELERATORS_IN_USE: Final = "AcceleratorsInUse"
KV_TIERS_AVAILABLE: Final = "KVTiersAvailable"
OTHER_MODELS_SERVED: Final = "OtherModelsServed"
DISAGGREGATING: Final = "Disaggregating"
KV_TRANSFER_VERIFIED: Final = "KVTransferVerified"
RECONCILING: Final = "Reconciling"
STALLED: Final = "Stalled"

ROLE_READY = {
    "prefill": PREFILL_READY,
    "decode": DECODE_READY,
    "mixed": MIXED_READY,
    "router": ROUTER_READY,
    "picker": PICKER_READY,
}

# All is well.
AS_DECLARED: Final = "AsDeclared"
UNKNOWN_ENGINE_VERSION: Final = "UnknownEngineVersion"
ETCD_ANSWERS: Final = "EtcdAnswers"
ANSWERING: Final = "Answering"
SCALED_TO_ZERO: Final = "ScaledToZero"
"""No worker is asked for; of Serving too, which is False then, as routers hold requests."""

# On the way.
STARTING: Final = "Starting"
ROLLING_OUT: Final = "RollingOut"
SCALING: Final = "Scaling"
DOWNLOADING_MODEL: Final = "DownloadingModel"
_ON_THE_WAY = (STARTING, ROLLING_OUT, SCALING, DOWNLOADING_MODEL)

# A user should look.
INVALID_SPEC: Final = "InvalidSpec"
ETCD_UNREACHABLE: Final = "EtcdUnreachable"
ETCD_FULL: Final = "EtcdFull"
IMAGE_NOT_PULLED: Final = "ImageNotPulled"
CONFIGURATION_REFUSED: Final = "ConfigurationRefused"
ACCELERATOR_UNUSABLE: Final = "AcceleratorUnusable"
CRASH_LOOPING: Final = "CrashLooping"
NODE_LOST: Final = "NodeLost"
UNSCHEDULABLE: Final = "Unschedulable"
GROUP_RESTARTING: Final = "GroupRestarting"
QUOTA_EXCEEDED: Final = "QuotaExceeded"
PODS_REFUSED: Final = "PodsRefused"
MODEL_NOT_DOWNLOADED: Final = "ModelNotDownloaded"
FORBIDDEN: Final = "Forbidden"
NAME_TAKEN: Final = "NameTaken"
APPLY_FAILED: Final = "ApplyFailed"
PROGRESS_DEADLINE_EXCEEDED: Final = "ProgressDeadlineExceeded"
NOT_ANSWERING: Final = "NotAnswering"

# What stands in the autoscaler's way.
METRICS_MISSING: Final = "MetricsMissing"
CAPACITY_SHORT: Final = "CapacityShort"
RATIO_CONSTRAINT_VIOLATED: Final = "RatioConstraintViolated"
BUDGET_TOO_SMALL: Final = "BudgetTooSmall"
BOUNDS_CONFLICT: Final = "BoundsConflict"
SCALING_LIMITED: Final = "ScalingLimited"

AUTOSCALING: Final = (
    METRICS_MISSING,
    CAPACITY_SHORT,
    RATIO_CONSTRAINT_VIOLATED,
    BUDGET_TOO_SMALL,
    BOUNDS_CONFLICT,
    SCALING_LIMITED,
)
"""Each is a condition of its own, there only while it is true, and its own reason."""

ROLLOUT_OVER_BUDGET: Final = "RolloutOverBudget"
"""A BlueGreen roll out needs more than autoscale.budget; its own reason."""

ROLLOUT_PAUSED: Final = "RolloutPaused"
"""A roll out waits at a gate for a user, or for facts; in Ready its own reason."""
ROLLED_BACK: Final = "RolledBack"
"""The revision of the spec was given up for the one before it; in Ready its own reason."""

_WHILE_TRUE = frozenset(
    {RECONCILING, STALLED, ROLLOUT_OVER_BUDGET, ROLLOUT_PAUSED, ROLLED_BACK, *AUTOSCALING}
)
"""All others are True while all is well."""

# What etcd and Kubernetes do not agree on.
GHOSTS: Final = "RecordsWithoutPods"
ORPHANS: Final = "PodsWithoutRecords"

# What workers of a pool with accelerators compute on.
ACCELERATORS_IDLE: Final = "AcceleratorsIdle"
DEVICE_NOT_SAID: Final = "DeviceNotSaid"

# Tiers below the KV blocks.
KV_TIER_STOPPED: Final = "KVTierStopped"

# Models of other clusters.
CLUSTER_MISSING: Final = "ClusterMissing"
MODEL_NOT_SERVED: Final = "ModelNotServed"
API_KEYS_DIFFER: Final = "ApiKeysDiffer"

# How prefill and decode work together.
OFFLOADING: Final = "Offloading"
NO_LONG_PROMPTS: Final = "NoLongPrompts"
PAIR_REFUSED: Final = "PairRefused"
NO_PREFILL_WORKER: Final = "NoPrefillWorker"
NOT_OFFLOADING: Final = "NotOffloading"

# Verification of KV transfers between pools.
KV_MOVED: Final = "KVMoved"
NOT_VERIFIED: Final = "NotVerified"
RATE_NOT_MEASURED: Final = "RateNotMeasured"
TRANSFER_FAILED: Final = "TransferFailed"
TRANSFER_NOT_USED: Final = "TransferNotUsed"
TRANSFER_SLOW: Final = "TransferSlow"
BLOCKS_DAMAGED: Final = "BlocksDamaged"
TOKENS_DIFFER: Final = "TokensDiffer"

# Why a roll out waits, or went back.
PAUSED_BY_USER: Final = "PausedByUser"
GATE_FAILED: Final = "GateFailed"
GATE_UNKNOWN: Final = "GateUnknown"
UNDONE: Final = "Undone"
NO_HISTORY: Final = "NoHistory"

# Of events only.
ROLLOUT_STARTED: Final = "RolloutStarted"
ROLLOUT_SWITCHED: Final = "RolloutSwitched"
ROLLOUT_DROPPED: Final = "RolloutDropped"
ROLLOUT_STEP_PASSED: Final = "RolloutStepPassed"
SCALED: Final = "Scaled"
DRAIN_CUT: Final = "DrainCut"
LOST_POD_DELETED: Final = "LostPodDeleted"
AUTOSCALED: Final = "Autoscaled"
ADVISED: Final = "Advised"
SCALERS_OVERRIDDEN: Final = "ScalersOverridden"

NEEDS_ACTION = frozenset(
    {
        INVALID_SPEC,
        ETCD_FULL,
        IMAGE_NOT_PULLED,
        CONFIGURATION_REFUSED,
        ACCELERATOR_UNUSABLE,
        CRASH_LOOPING,
        NODE_LOST,
        QUOTA_EXCEEDED,
        PODS_REFUSED,
        MODEL_NOT_DOWNLOADED,
        FORBIDDEN,
        NAME_TAKEN,
        APPLY_FAILED,
        PROGRESS_DEADLINE_EXCEEDED,
        ROLLOUT_PAUSED,
        ROLLED_BACK,
    }
)
"""Reasons that do not pass by waiting: with one of them the cluster is Stalled."""

CONDITIONS_FILE: Final = "conditions.json"
"""Beside the policy file, in its ConfigMap: the conditions as the status has them, for workers."""

SEVERITIES: Final = ("needs action", "problem", "on the way", "unknown", "fine")
"""Worst first."""


def severity_of(kind: str, status: str, reason: str) -> str:
    """One of SEVERITIES.  kind, status, reason: as the condition has them"""
    is_wrong = status == ("True" if kind in _WHILE_TRUE else "False")
    if reason == SCALED_TO_ZERO:
        return "fine"
    if is_wrong and (kind == STALLED or reason in NEEDS_ACTION):
        return "needs action"
    if is_wrong:
        return "on the way" if kind == RECONCILING or reason in _ON_THE_WAY else "problem"
    return "fine" if status in ("True", "False") else "unknown"
