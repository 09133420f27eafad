"""`spec.routing`: where a request and its prefill run, and by which numbers."""

from typing import Annotated, Literal

from pydantic import Field

from pdcluster_operator.api.section import Section
from pdcluster_operator.api.values import Natural, Weight


class OffloadSpec(Section):
    """Numbers of the offload decision [O1]: uncached prompt tokens, requests in the prefill queue, running decodes."""

    prefill_length_threshold: Natural = 256
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64


class PrefillScoreSpec(Section):
    """Choice among prefill workers with credit: lowest loadWeight * queued tokens - prefixWeight * matched tokens."""

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0


class CreditsSpec(Section):
    """How far ahead of its engine a prefill worker accepts work: batchesAhead * maxBatchedTokens tokens."""

    batches_ahead: Annotated[float, Field(gt=0.0, le=1000.0)] = 2.0


class KvAwareSpec(Section):
    """Weights of the policy kvAware [Y9], in KV blocks.

    overlap_credit:        of a cached block, against one that is computed
    prefill_load_scale:    of a block to compute, against one that decodes
    prefill_decay:         how far prompts that are queued before it lessen the credit
    active_request_weight: of a request on the worker
    track_prefill:         whether prompts queued at decode workers count
    """

    overlap_credit: Weight = 1.0
    prefill_load_scale: Weight = 1.0
    prefill_decay: Weight = 0.0
    active_request_weight: Weight = 0.0
    track_prefill: bool = True


class CapacityAwareSpec(Section):
    """Weights of the policy capacityAware: the simple latency cost of [O5]."""

    occupancy_weight: Weight = 0.7
    active_weight: Weight = 0.3


class LatencyAwareSpec(Section):
    """Weights of the policy latencyAware: the extended latency cost of [O5]."""

    kv_occupancy_weight: Weight = 3.0
    active_weight: Weight = 1.0
    cache_match_weight: Weight = 10.0
    memory_bandwidth_weight: Weight = 0.5
    recent_prefix_weight: Weight = 1.0


DecodePolicy = Literal["leastRequest", "roundRobin", "prefixAware", "kvAware", "capacityAware", "latencyAware"]


class DecodeScoreSpec(Section):
    """Choice of the decode or mixed worker that runs a request (docs/routing.md).

    temperature:        0 = the lowest cost; above, a draw by softmax over the costs
    kv_events:          prefix matches by the workers' events; false = by what was sent lately
    recent_seconds:     how long a prefix that was sent to a worker counts as recent
    hot_workers_ratio:  share of the workers that have a prefix from which on it attracts no more
    max_share_ratio:    most requests of one worker, in means of all
    failure_taint:      factor of the cost of a worker that failed a request lately
    queue_threshold_tokens: a worker with more prompt tokens queued is busy; while all are, requests
                        wait at the ingress; None = never
    allow_request_overrides: requests may name a worker, a policy or weights of their own
    """

    policy: DecodePolicy = "leastRequest"
    temperature: Weight = 0.0
    kv_events: bool = True
    recent_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 120.0
    hotspot_prevention: bool = True
    hot_workers_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.75
    max_share_ratio: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.5
    session_affinity: bool = True
    failure_taint: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    queue_threshold_tokens: Natural | None = None
    allow_request_overrides: bool = False
    kv_aware: KvAwareSpec = KvAwareSpec()
    capacity_aware: CapacityAwareSpec = CapacityAwareSpec()
    latency_aware: LatencyAwareSpec = LatencyAwareSpec()


PREFILL_PARTS = ("offload", "prefill_score", "credits")
"""Sections that mean something beside prefill workers alone."""


class RoutingSpec(Section):
    """Policy: where a request and its prefill run; takes effect without a restart."""

    offload: OffloadSpec = OffloadSpec()
    prefill_score: PrefillScoreSpec = PrefillScoreSpec()
    credits: CreditsSpec = CreditsSpec()
    decode_score: DecodeScoreSpec = DecodeScoreSpec()
