"""`spec.routing`: where a request and its prefill run, and by which numbers."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule
from pdcluster_schema.section import Many, SpecSection
from pdcluster_schema.values import Natural, Positive, Weight

DEFAULT_LENGTH_THRESHOLD = 256
"""Uncached tokens, where accelerators.yaml does not know the decode workers' break-even."""

MAX_BUCKETS = 16
MAX_CLASSES = 8

Batches = Annotated[float, Field(gt=0.0, le=1000.0)]
Milliseconds = Annotated[float, Field(ge=0.0, le=600_000.0)]
Window = Annotated[float, Field(ge=0.0, le=1000.0)]
Prompts = Annotated[int, Field(ge=1, le=1024)]
SloMilliseconds = Annotated[float, Field(gt=0.0, le=600_000.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class OffloadScoreSpec(SpecSection):
    """Weights of the policy `score`: a prompt goes when its score is over min_score.

    length_weight, decode_weight:  added while uncached length and running decodes are over
                                   prefillLengthThreshold and decodeLoadThreshold
    queue_weight, transfer_weight: taken off while the prefill queue is over prefillQueueMax, and
                                   the expected KV transfer over transferMilliseconds
    """

    length_weight: Weight = 0.7
    queue_weight: Weight = 0.3
    decode_weight: Weight = 0.0
    transfer_weight: Weight = 0.0
    transfer_milliseconds: Milliseconds = 50.0
    min_score: Weight = 0.5


class IslBoundingSpec(SpecSection):
    """A prompt stays when its uncached tokens, and their share of it, are below both."""

    max_tokens: Natural = 2048
    max_ratio: Share = 0.7


class PrefillLoadSpec(SpecSection):
    """A prompt stays when every prefill worker has over so many batches in hand; None = none is too
    busy.
    """

    busy_batches: Batches | None = None


class SloFeedbackSpec(SpecSection):
    """Bounds of the threshold that `sloFeedback` moves, and the objectives that it goes by.

    margin: by this share one side has to be better before the threshold moves
    """

    ttft_slo_milliseconds: SloMilliseconds = 500.0
    tpot_slo_milliseconds: SloMilliseconds = 50.0
    min_threshold: Positive = 32
    max_threshold: Positive = 8192
    margin: Share = 0.15

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.min_threshold, self.max_threshold
        if low > high:
            reason, fix = (
                f"must be at most maxThreshold ({high}), not {low}",
                "lower minThreshold or raise maxThreshold",
            )
            raise rule(reason, fix, at="minThreshold")
        return self


class OffloadSpec(SpecSection):
    """Choice of the prompts that go to a prefill worker.

    policy: rule, measured (rule, but not to a side that is measured to be slower), score,
            islBounding, prefillLoad, islOrLoad (either), sloFeedback (rule with a moving threshold)
    prefill_length_threshold: uncached tokens; None = break-even of the decode workers' accelerator,
                              or 256
    max_transfer_milliseconds: a prompt whose KV is expected to take longer stays; 0 = no bound
    decode_busy_ratio: with over this share of its KV blocks in use a decode worker keeps no prompt;
                       None = off
    """

    policy: Literal[
        "rule", "measured", "score", "islBounding", "prefillLoad", "islOrLoad", "sloFeedback"
    ] = "rule"
    prefill_length_threshold: Natural | None = None
    prefill_queue_max: Natural = 10
    decode_load_threshold: Natural = 8
    min_offload_length: Natural = 64
    max_transfer_milliseconds: Milliseconds = 0.0
    decode_busy_ratio: Share | None = None
    score: OffloadScoreSpec = OffloadScoreSpec()
    isl_bounding: IslBoundingSpec = IslBoundingSpec()
    prefill_load: PrefillLoadSpec = PrefillLoadSpec()
    slo_feedback: SloFeedbackSpec = SloFeedbackSpec()


class PrefillScoreSpec(SpecSection):
    """Choice among prefill workers with credit, the lowest of a sum.

    loadWeight * queued tokens - prefixWeight * matched tokens + transferWeight * expected
    milliseconds of the KV transfer.
    """

    prefix_weight: Weight = 1.0
    load_weight: Weight = 1.0
    transfer_weight: Weight = 0.0


class LatencyClassSpec(SpecSection):
    """Prompts of that priority or a more urgent one (lower goes first) wait for company so long."""

    priority: Annotated[int, Field(ge=-1000, le=1000)]
    window_milliseconds: Window


class PrefillQueueSpec(SpecSection):
    """Batching of prompts at a prefill worker, and the time it waits for them.

    mode: immediate = each as soon as there is room; latencyFirst = after a window that grows with
          the load; throughputFirst = minPrompts together, or after maxWindowMilliseconds
    max_prompts:      of one group
    length_buckets:   greatest lengths of the buckets in uncached tokens, ascending; a group is of
                      one bucket
    fast_lane_tokens: prompts of up to so many go first, and wait for no company; 0 = none
    latency_classes:  windows by priority, in place of the mode's; the first that fits
    """

    mode: Literal["immediate", "latencyFirst", "throughputFirst"] = "immediate"
    min_window_milliseconds: Window = 2.0
    max_window_milliseconds: Window = 10.0
    min_prompts: Prompts = 8
    max_prompts: Prompts = 32
    length_buckets: Annotated[tuple[Positive, ...], Many, Field(max_length=MAX_BUCKETS)] = (
        512,
        1024,
        2048,
        4096,
    )
    fast_lane_tokens: Natural = 0
    latency_classes: Annotated[
        tuple[LatencyClassSpec, ...], Many, Field(max_length=MAX_CLASSES)
    ] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.min_window_milliseconds, self.max_window_milliseconds
        if low > high:
            reason = f"must be at most maxWindowMilliseconds ({high:g}), not {low:g}"
            raise rule(
                reason,
                "lower minWindowMilliseconds or raise maxWindowMilliseconds",
                at="minWindowMilliseconds",
            )
        if self.min_prompts > self.max_prompts:
            reason = f"must be at most maxPrompts ({self.max_prompts}), not {self.min_prompts}"
            raise rule(reason, "lower minPrompts or raise maxPrompts", at="minPrompts")
        if not _ascends(self.length_buckets):
            raise rule("must ascend, each once", "sort them", at="lengthBuckets")
        if not _ascends([each.priority for each in self.latency_classes]):
            raise rule("must ascend by priority, each once", "sort them", at="latencyClasses")
        return self


def _ascends(values: Sequence[int]) -> bool:
    return list(values) == sorted(set(values))


class CreditsSpec(SpecSection):
    """Work that a prefill worker accepts ahead of its engine: batchesAhead * maxBatchedTokens
    tokens.
    """

    batches_ahead: Batches = 2.0


class MovingSpec(SpecSection):
    """Policy of moving a request that has begun to another decode worker.

    enabled:   it moves when its worker is lost, stalls or drains
    max_moves: of one choice of a request
    after_preemptions: a request that its worker preempted so often moves too; 0 = none does
    """

    enabled: bool = True
    max_moves: Annotated[int, Field(ge=1, le=16)] = 2
    after_preemptions: Natural = 0


class RacingSpec(SpecSection):
    """Policy of racing a request on two decode workers until one has made its first token.

    max_requests: most requests on either, waiting or running
    max_ratio:    of all requests, that race at most
    """

    enabled: bool = False
    max_requests: Natural = 2
    max_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1


class RelayingSpec(SpecSection):
    """Policy of routers that hand on the bytes of requests (docs/routing.md).

    enabled:      otherwise they tokenize
    policy:       choice of the worker; textPrefix = the one that had the beginning of this prompt
    prefix_bytes: of that beginning
    max_retries:  other workers that a request is tried at before the router serves it itself
    """

    enabled: bool = False
    policy: Literal["leastRequest", "roundRobin", "textPrefix"] = "leastRequest"
    prefix_bytes: Annotated[int, Field(ge=64, le=65536)] = 1024
    max_retries: Annotated[int, Field(ge=0, le=8)] = 2


class KvAwareSpec(SpecSection):
    """Weights of the policy kvAware, in KV blocks.

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


class CapacityAwareSpec(SpecSection):
    """Weights of the policy capacityAware: the simple latency cost."""

    occupancy_weight: Weight = 0.7
    active_weight: Weight = 0.3


class LatencyAwareSpec(SpecSection):
    """Weights of the policy latencyAware: the extended latency cost."""

    kv_occupancy_weight: Weight = 3.0
    active_weight: Weight = 1.0
    cache_match_weight: Weight = 10.0
    memory_bandwidth_weight: Weight = 0.5
    recent_prefix_weight: Weight = 1.0


DecodePolicy = Literal[
    "leastRequest", "roundRobin", "prefixAware", "kvAware", "capacityAware", "latencyAware"
]


class DecodeScoreSpec(SpecSection):
    """Choice of the decode or mixed worker that runs a request (docs/routing.md).

    temperature:        0 = the lowest cost; above, a draw by softmax over the costs
    kv_events:          prefix matches by the workers' events; false = by what was sent lately
    recent_seconds:     how long a prefix that was sent to a worker counts as recent
    hot_workers_ratio:  share of the workers that have a prefix from which on it attracts no more
    max_share_ratio:    most requests of one worker, in means of all
    min_cache_hit_ratio: share of a prompt's blocks below which a match on a worker counts for
                         nothing
    failure_taint:      factor of the cost of a worker that failed a request lately; at least this -
                        1 is added
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
    min_cache_hit_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    session_affinity: bool = True
    failure_taint: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    queue_threshold_tokens: Natural | None = None
    allow_request_overrides: bool = False
    kv_aware: KvAwareSpec = KvAwareSpec()
    capacity_aware: CapacityAwareSpec = CapacityAwareSpec()
    latency_aware: LatencyAwareSpec = LatencyAwareSpec()


PREFILL_PARTS = ("offload", "prefill_score", "prefill_queue", "credits")
"""Sections that mean something beside prefill workers alone."""


class RoutingSpec(SpecSection):
    """Policy: where a request and its prefill run; takes effect without a restart."""

    offload: OffloadSpec = OffloadSpec()
    prefill_score: PrefillScoreSpec = PrefillScoreSpec()
    prefill_queue: PrefillQueueSpec = PrefillQueueSpec()
    credits: CreditsSpec = CreditsSpec()
    moving: MovingSpec = MovingSpec()
    racing: RacingSpec = RacingSpec()
    relaying: RelayingSpec = RelayingSpec()
    decode_score: DecodeScoreSpec = DecodeScoreSpec()
