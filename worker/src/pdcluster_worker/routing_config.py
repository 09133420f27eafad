"""The policy of `spec.routing`: where a request runs and its prompt is computed, and by which numbers."""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config_section import Natural, PolicySection, Share, Weight


class OffloadPolicy(PolicySection, frozen=True):
    """Numbers of the offload decision [O1]."""

    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64


class PrefillScorePolicy(PolicySection, frozen=True):
    """Choice among prefill workers with credit: lowest load_weight * queued tokens - prefix_weight * matched tokens."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0


class CreditPolicy(PolicySection, frozen=True):
    """How far ahead of its engine a prefill worker accepts work: tokens = batches_ahead * maxBatchedTokens."""

    batches_ahead: Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)] = 2.0


DecodePolicyName = Literal["leastRequest", "roundRobin", "prefixAware", "kvAware", "capacityAware", "latencyAware"]


class KvAwarePolicy(PolicySection, frozen=True):
    """Weights of `kvAware` [Y9], see `routing.decode_score.kv_aware`.

    overlap_credit:     of a cached block, against one that is computed; 0 = pure load balance.
    prefill_load_scale: of a block to compute, against one that decodes.
    prefill_decay:      how far prompts queued before it lessen the credit.
    active_request_weight: of a request, in blocks.
    track_prefill:      false for decode workers that compute no prompts.
    """

    overlap_credit: Weight = 1.0
    prefill_load_scale: Weight = 1.0
    prefill_decay: Weight = 0.0
    active_request_weight: Weight = 0.0
    track_prefill: bool = True


class CapacityAwarePolicy(PolicySection, frozen=True):
    """Weights of `capacityAware`: the simple latency cost of [O5]."""

    occupancy_weight: Weight = 0.7
    active_weight: Weight = 0.3


class LatencyAwarePolicy(PolicySection, frozen=True):
    """Weights of `latencyAware`: the extended latency cost of [O5], table 17-3."""

    kv_occupancy_weight: Weight = 3.0
    active_weight: Weight = 1.0
    cache_match_weight: Weight = 10.0
    memory_bandwidth_weight: Weight = 0.5
    recent_prefix_weight: Weight = 1.0


class DecodeScorePolicy(PolicySection, frozen=True):
    """Choice of the decode worker that runs a request, see `routing.decode_score`.

    temperature:   0 = the lowest cost; above, a draw by softmax over the costs [Y10].
    kv_events:     prefix matches by the workers' events; false = by what was sent where lately [Y11].
    recent_seconds: how long a prefix that was sent to a worker counts as recent.
    hotspot_prevention: see `routing.decode_score.hotspot`, which says what both ratios mean.
    session_affinity: the requests of one session go to one worker.
    failure_taint: factor of the cost of a worker that failed a request in the last seconds [Y10].
    queue_threshold_tokens: a worker with more prompt tokens to compute is busy, and while all are, requests wait here [Y13];
        None = they never do.
    allow_request_overrides: whether a request may name a worker, a policy or weights of its own, for tests.
    """

    policy: DecodePolicyName = "leastRequest"
    temperature: Weight = 0.0
    kv_events: bool = True
    recent_seconds: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 120.0
    hotspot_prevention: bool = True
    hot_workers_ratio: Share = 0.75
    max_share_ratio: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 1.5
    session_affinity: bool = True
    failure_taint: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 1.0
    queue_threshold_tokens: Natural | None = None
    allow_request_overrides: bool = False
    kv_aware: KvAwarePolicy = KvAwarePolicy()
    capacity_aware: CapacityAwarePolicy = CapacityAwarePolicy()
    latency_aware: LatencyAwarePolicy = LatencyAwarePolicy()
