"""The policy of `spec.routing`: which worker decodes a request, and which one prefills it."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import Natural, PolicySection, Positive, Share, Weight

OffloadPolicyName = Literal[
    "rule", "measured", "score", "islBounding", "prefillLoad", "islOrLoad", "sloFeedback"
]
Batches = Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0.0, le=600_000.0)]
Window = Annotated[float, msgspec.Meta(ge=0.0, le=1000.0)]
Prompts = Annotated[int, msgspec.Meta(ge=1, le=1024)]
SloMilliseconds = Annotated[float, msgspec.Meta(gt=0.0, le=600_000.0)]


class OffloadScorePolicy(PolicySection, frozen=True):
    """Policy `score`: offload when the score is over min_score (`routing.offload.score`)."""

    length_weight: Weight = 0.7
    queue_weight: Weight = 0.3
    decode_weight: Weight = 0.0
    transfer_weight: Weight = 0.0
    transfer_milliseconds: Milliseconds = 50.0
    min_score: Weight = 0.5


class IslBoundingPolicy(PolicySection, frozen=True):
    """A prompt stays when its uncached tokens, and their share of it, are below both."""

    max_tokens: Natural = 2048
    max_ratio: Share = 0.7


class PrefillLoadPolicy(PolicySection, frozen=True):
    """A prompt stays while every prefill worker has more batches of work; None = never."""

    busy_batches: Batches | None = None


class SloFeedbackPolicy(PolicySection, frozen=True):
    """margin: share by which one side must be faster before the threshold moves."""

    ttft_slo_milliseconds: SloMilliseconds = 500.0
    tpot_slo_milliseconds: SloMilliseconds = 50.0
    min_threshold: Positive = 32
    max_threshold: Positive = 8192
    margin: Share = 0.15

    def __post_init__(self) -> None:
        if self.min_threshold > self.max_threshold:
            raise ValueError(
                f"minThreshold ({self.min_threshold}) must be at most maxThreshold "
                f"({self.max_threshold}): lower minThreshold or raise maxThreshold"
            )


class OffloadPolicy(PolicySection, frozen=True):
    """Rules for sending a prompt to a prefill worker (`routing.offload`)."""

    policy: OffloadPolicyName = "rule"
    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64
    max_transfer_milliseconds: Milliseconds = 0.0  # longer ones stay; 0 = no limit
    decode_busy_ratio: Share | None = None  # of KV blocks; over it no prompt stays
    score: OffloadScorePolicy = OffloadScorePolicy()
    isl_bounding: IslBoundingPolicy = IslBoundingPolicy()
    prefill_load: PrefillLoadPolicy = PrefillLoadPolicy()
    slo_feedback: SloFeedbackPolicy = SloFeedbackPolicy()
    length_thresholds: dict[str, Natural] = msgspec.field(default_factory=dict)  # by accelerator


class PrefillScorePolicy(PolicySection, frozen=True):
    """Cost: load_weight * queued tokens - prefix_weight * matched tokens + transfer_weight * ms."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0
    transfer_weight: Weight = 0.0


class CreditPolicy(PolicySection, frozen=True):
    """Work that a prefill worker accepts ahead: batches_ahead * maxBatchedTokens tokens."""

    batches_ahead: Batches = 2.0


class LatencyClass(PolicySection, frozen=True):
    """Window of that priority and more urgent ones (lower goes first)."""

    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)]
    window_milliseconds: Window


class PrefillQueuePolicy(PolicySection, frozen=True):
    """Batch windows of a prefill worker (`routing.batching`)."""

    # latencyFirst = the window grows with the load; throughputFirst = min_prompts or max_window
    mode: Literal["immediate", "latencyFirst", "throughputFirst"] = "immediate"
    min_window_milliseconds: Window = 2.0
    max_window_milliseconds: Window = 10.0
    min_prompts: Prompts = 8
    max_prompts: Prompts = 32
    # upper bounds in uncached tokens; a group is of one bucket
    length_buckets: Annotated[list[Positive], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=lambda: [512, 1024, 2048, 4096]
    )
    fast_lane_tokens: Natural = 0  # shorter prompts go first, without a window
    # windows by priority, overriding the mode's
    latency_classes: Annotated[list[LatencyClass], msgspec.Meta(max_length=8)] = msgspec.field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        low, high = self.min_window_milliseconds, self.max_window_milliseconds
        if low > high:
            raise ValueError(
                f"minWindowMilliseconds ({low:g}) must be at most maxWindowMilliseconds "
                f"({high:g}): lower it"
            )
        if self.min_prompts > self.max_prompts:
            raise ValueError(
                f"minPrompts ({self.min_prompts}) must be at most maxPrompts ({self.max_prompts}): "
                "lower it"
            )
        for name, values in (
            ("lengthBuckets", self.length_buckets),
            ("latencyClasses", [each.priority for each in self.latency_classes]),
        ):
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must ascend, each once: sort them")


DecodePolicyName = Literal[
    "leastRequest", "roundRobin", "prefixAware", "kvAware", "capacityAware", "latencyAware"
]


class KvAwarePolicy(PolicySection, frozen=True):
    overlap_credit: Weight = 1.0  # of a cached block
    prefill_load_scale: Weight = 1.0  # of a block to prefill
    prefill_decay: Weight = 0.0  # of the credit by queued prompts
    active_request_weight: Weight = 0.0  # in blocks
    track_prefill: bool = True  # false: decode workers compute no prompts


class CapacityAwarePolicy(PolicySection, frozen=True):
    occupancy_weight: Weight = 0.7
    active_weight: Weight = 0.3


class LatencyAwarePolicy(PolicySection, frozen=True):
    """Weights of table 17-3 (`routing.decode_score.latency`)."""

    kv_occupancy_weight: Weight = 3.0
    active_weight: Weight = 1.0
    cache_match_weight: Weight = 10.0
    memory_bandwidth_weight: Weight = 0.5
    recent_prefix_weight: Weight = 1.0


class DecodeScorePolicy(PolicySection, frozen=True):
    """Choice of the decode worker (`routing.decode_score`)."""

    policy: DecodePolicyName = "leastRequest"
    temperature: Weight = 0.0  # 0 = lowest cost; else a softmax sample
    kv_events: bool = True  # else matches are of what was sent recently
    recent_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 120.0
    hotspot_prevention: bool = True
    hot_workers_ratio: Share = 0.75
    max_share_ratio: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 1.5
    min_cache_hit_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5  # of a prompt
    session_affinity: bool = True
    # cost factor after a failure
    failure_taint: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 1.0
    queue_threshold_tokens: Natural | None = None  # while all workers have more, requests wait
    allow_request_overrides: bool = False  # for tests
    kv_aware: KvAwarePolicy = KvAwarePolicy()
    capacity_aware: CapacityAwarePolicy = CapacityAwarePolicy()
    latency_aware: LatencyAwarePolicy = LatencyAwarePolicy()
