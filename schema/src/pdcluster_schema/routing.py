"""`spec.routing`: where a request and its prefill run, and by which numbers."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from pdcluster_schema.section import Many, Rule, SpecSection, ascending
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


OffloadPolicyName = Literal["rule", "measured", "score", "sloFeedback"]


class OffloadScoreSpec(SpecSection):
    """Weights of the policy score. A prompt goes when their sum is over minScore; each counts while
    its metric is over its threshold.
    """

    length_weight: Weight = 0.7
    """Added while the uncached tokens are over prefillLengthThreshold."""
    queue_weight: Weight = 0.3
    """Taken off while the prefill queue is over prefillQueueMax."""
    decode_weight: Weight = 0.0
    """Added while the running decodes are over decodeLoadThreshold."""
    transfer_weight: Weight = 0.0
    """Taken off while the expected KV transfer is over transferMilliseconds."""
    transfer_milliseconds: Milliseconds = 50.0
    """Threshold of the expected KV transfer."""
    min_score: Weight = 0.5
    """The sum has to be over it."""


class SloFeedbackSpec(SpecSection):
    """Objectives and bounds of the policy sloFeedback."""

    ttft_slo_milliseconds: SloMilliseconds = 500.0
    """Time to first token that a remote prefill may take to spare decodes."""
    tpot_slo_milliseconds: SloMilliseconds = 50.0
    """Time per output token over which local prefills become fewer."""
    min_threshold: Positive = 32
    """Least length threshold in uncached tokens."""
    max_threshold: Positive = 8192
    """Greatest length threshold in uncached tokens."""
    margin: Share = 0.15
    """Share by which one side has to be better before the threshold moves."""

    RULES = (ascending("minThreshold", "maxThreshold"),)


class OffloadSpec(SpecSection):
    """Choice of the prompts that go to a prefill worker, by their uncached tokens. By the policy
    rule a prompt goes when it has at least prefillLengthThreshold of them and fewer than
    prefillQueueMax requests wait for prefill, or when decodeLoadThreshold requests decode and it
    has at least minOffloadLength of them.
    """

    policy: OffloadPolicyName = "rule"
    """rule is described above; measured is the rule, but avoids a side that is measured to be
    slower to the first token; score adds up weights; sloFeedback goes by prefillQueueMax and a
    length threshold that follows measured times to the first token and between tokens.
    """
    prefill_length_threshold: Natural | None = None
    """Uncached prompt tokens. Left out, it is the length from which a prefill lengthens a decode
    step of the decode pools' accelerator (H100 295, H200 206, B200 and B300 281, GB200 and GB300
    312), or 256 where that is not known.
    """
    prefill_queue_max: Natural = 10
    """Requests in the prefill queue."""
    decode_load_threshold: Natural = 8
    """Requests that decode on the worker."""
    min_offload_length: Natural = 64
    """Uncached prompt tokens."""
    max_transfer_milliseconds: Milliseconds = 0.0
    """A prompt whose KV is expected to take longer on its way, at the rate measured between the two
    workers, stays. 0 = no bound.
    """
    decode_busy_ratio: Share | None = None
    """A decode worker with more than this share of its KV blocks in use keeps no prompt, whatever
    the policy. By default off.
    """
    score: OffloadScoreSpec = OffloadScoreSpec()
    slo_feedback: SloFeedbackSpec = SloFeedbackSpec()


class PrefillScoreSpec(SpecSection):
    """Choice among prefill workers with credit: the lowest loadWeight * queued tokens -
    prefixWeight * matched tokens + transferWeight * milliseconds that the KV is expected to take.
    """

    prefix_weight: Weight = 1.0
    """Weight of a token in the worker's prefix cache."""
    load_weight: Weight = 1.0
    """Weight of a token in the worker's queue."""
    transfer_weight: Weight = 0.0
    """Weight of a millisecond of the expected KV transfer."""


class LatencyClassSpec(SpecSection):
    """Prompts of that priority or a more urgent one (lower goes first) wait for company so long."""

    priority: Annotated[int, Field(ge=-1000, le=1000)]
    """Prompts of this priority or a more urgent one (lower goes first)."""
    window_milliseconds: Window
    """Longest wait for company."""


class PrefillQueueSpec(SpecSection):
    """Grouping of the prompts that a prefill worker lets in together, and its waits for them."""

    mode: Literal["immediate", "latencyFirst", "throughputFirst"] = "immediate"
    """immediate = each prompt as soon as there is room; latencyFirst = after a window that grows
    with the load, at low load at once; throughputFirst = minPrompts together, or after
    maxWindowMilliseconds.
    """
    min_window_milliseconds: Window = 2.0
    """Window of latencyFirst on an idle worker that expects company."""
    max_window_milliseconds: Window = 10.0
    """Window of latencyFirst where all credit is out, and of throughputFirst."""
    min_prompts: Prompts = 8
    """Prompts that end a window of throughputFirst."""
    max_prompts: Prompts = 32
    """Most prompts of one group."""
    length_buckets: Annotated[tuple[Positive, ...], Many, Field(max_length=MAX_BUCKETS)] = (
        512,
        1024,
        2048,
        4096,
    )
    """Greatest lengths of the buckets in uncached tokens, ascending; a group is of one bucket. By
    default 512, 1024, 2048 and 4096.
    """
    fast_lane_tokens: Natural = 0
    """Prompts of up to so many uncached tokens go first and wait for no company. 0 = none."""
    latency_classes: Annotated[
        tuple[LatencyClassSpec, ...], Many, Field(max_length=MAX_CLASSES)
    ] = ()
    """Windows by priority, in place of the mode's; the first that fits."""

    RULES = (
        Rule(
            cel="(has(self.minWindowMilliseconds) ? self.minWindowMilliseconds : 2.0) <= "
            "(has(self.maxWindowMilliseconds) ? self.maxWindowMilliseconds : 10.0)",
            holds=lambda queue: queue.min_window_milliseconds <= queue.max_window_milliseconds,
            reason="must be at most {maxWindowMilliseconds}",
            fix="lower minWindowMilliseconds or raise maxWindowMilliseconds",
            at="minWindowMilliseconds",
        ),
        Rule(
            cel="(has(self.minPrompts) ? self.minPrompts : 8) <= (has(self.maxPrompts) ? "
            "self.maxPrompts : 32)",
            holds=lambda queue: queue.min_prompts <= queue.max_prompts,
            reason="must be at most {maxPrompts}",
            fix="lower minPrompts or raise maxPrompts",
            at="minPrompts",
        ),
        Rule(
            cel="!has(self.lengthBuckets) || self.lengthBuckets.all(x, "
            "self.lengthBuckets.exists_one(y, y == x)) && self.lengthBuckets.isSorted()",
            holds=lambda queue: _ascends(queue.length_buckets),
            reason="must ascend, each once",
            fix="sort them",
            at="lengthBuckets",
        ),
        Rule(
            cel="!has(self.latencyClasses) || self.latencyClasses.all(x, "
            "self.latencyClasses.exists_one(y, y.priority == x.priority)) && "
            "self.latencyClasses.map(x, x.priority).isSorted()",
            holds=lambda queue: _ascends([each.priority for each in queue.latency_classes]),
            reason="must ascend by priority, each once",
            fix="sort them",
            at="latencyClasses",
        ),
    )


def _ascends(values: Sequence[int]) -> bool:
    return list(values) == sorted(set(values))


class CreditsSpec(SpecSection):
    """Work that a prefill worker accepts ahead of its engine."""

    batches_ahead: Batches = 2.0
    """Steps of maxBatchedTokens tokens."""


class MovingSpec(SpecSection):
    """A request that has begun goes on at another decode worker, with the same tokens, when its own
    is lost, stalls or drains. Otherwise it ends in an error, or holds the drain.
    """

    enabled: bool = True
    """Requests that have begun move."""
    max_moves: Annotated[int, Field(ge=1, le=16)] = 2
    """Most moves of one choice of a request, so that one that crashes its workers ends only a few.
    """
    after_preemptions: Natural = 0
    """A request that its worker preempted so often, for want of KV blocks, moves to one with twice
    the room it needs; 0 = none does.
    """


class RacingSpec(SpecSection):
    """A request runs twice until one run has made its first token; the other is cancelled: on two
    decode workers, or on two models.
    """

    enabled: bool = False
    """Requests race on two decode workers."""
    models: bool = False
    """A request may race on another model too, one of service.models that it names (its field
    pdcluster.race): the first one to begin a stream, or to have a whole answer, wins.
    """
    max_requests: Natural = 2
    """Most requests on either worker, waiting or running."""
    max_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Largest share of all requests that race, of each kind."""


RelayingPolicyName = Literal["leastRequest", "roundRobin", "textPrefix"]


class RelayingSpec(SpecSection):
    """Routers hand the bytes of plain requests to a decode or mixed worker's HTTP port, and its
    answer's bytes back, in place of tokenizing. That worker is the ingress. An answer that has
    begun ends with that worker.
    """

    enabled: bool = False
    """Routers relay."""
    policy: RelayingPolicyName = "leastRequest"
    """Choice of the worker, by pickers too: the fewest requests, one after the other, or the one
    that had the beginning of this prompt's text. A session goes first
    (decodeScore.sessionAffinity).
    """
    prefix_bytes: Annotated[int, Field(ge=64, le=65536)] = 1024
    """Bytes of that beginning, as the request has them."""
    max_retries: Annotated[int, Field(ge=0, le=8)] = 2
    """Other workers that a request is tried at before its answer begins; then the router serves it
    itself.
    """


class KvAwareSpec(SpecSection):
    """Weights of kvAware, in KV blocks."""

    overlap_credit: Weight = 1.0
    """Weight of a cached block, against one that is computed; 0 = load alone decides."""
    prefill_load_scale: Weight = 1.0
    """Weight of a block to compute, against one that decodes."""
    prefill_decay: Weight = 0.0
    """Rate at which prompts queued before it lessen the credit."""
    active_request_weight: Weight = 0.0
    """Weight of a request on the worker."""
    track_prefill: bool = True
    """Prompts that are queued at decode workers count; false where these compute none."""


class CapacityAwareSpec(SpecSection):
    """Weights of capacityAware."""

    occupancy_weight: Weight = 0.7
    """Weight of a percent of the time that its GPU or engine is busy."""
    active_weight: Weight = 0.3
    """Weight of a request on the worker."""


class LatencyAwareSpec(SpecSection):
    """Weights of latencyAware."""

    kv_occupancy_weight: Weight = 3.0
    """Weight of a percent of its KV blocks in use."""
    active_weight: Weight = 1.0
    """Weight of a request on the worker."""
    cache_match_weight: Weight = 10.0
    """Weight of a prefix that it has cached."""
    memory_bandwidth_weight: Weight = 0.5
    """Weight of a percent of the time that its GPU moves memory."""
    recent_prefix_weight: Weight = 1.0
    """Weight of a prefix that was sent there recently."""


DecodePolicy = Literal[
    "leastRequest", "roundRobin", "prefixAware", "kvAware", "capacityAware", "latencyAware"
]


class DecodeScoreSpec(SpecSection):
    """Choice of the decode or mixed worker that runs a request: leastRequest the fewest requests,
    roundRobin one after the other, prefixAware the longest cached prefix, kvAware the fewest KV
    blocks to compute and to hold, capacityAware the least busy with room for it, latencyAware the
    lowest of a latency cost.
    """

    policy: DecodePolicy = "leastRequest"
    """Choice of the worker."""
    temperature: Weight = 0.0
    """0 = the lowest cost; above, a draw by softmax over the costs."""
    kv_events: bool = True
    """Cached prefixes are known by the workers' events; without, by the prompts that were sent to
    each recently.
    """
    recent_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 120.0
    """Time for which a prefix that was sent to a worker counts as recent."""
    hotspot_prevention: bool = True
    """A prefix that most workers have attracts no more, and no worker takes more than its share of
    the requests.
    """
    hot_workers_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.75
    """Share of the workers that have a prefix from which on it attracts no more."""
    max_share_ratio: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.5
    """Most requests of one worker, in means of all."""
    min_cache_hit_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of a prompt's blocks below which a match on a worker counts for nothing; 0 = every
    match counts.
    """
    session_affinity: bool = True
    """Requests that name the same pdcluster.session go to one worker."""
    failure_taint: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    """Factor of the cost of a worker that failed a request in the last 10 seconds; at least this
    less 1 is added.
    """
    queue_threshold_tokens: Natural | None = None
    """A worker with more prompt tokens queued is busy; while all are, requests wait at the ingress.
    Without it they never do.
    """
    allow_request_overrides: bool = False
    """A request may name its worker, and a policy and weights of its own, in pdcluster.route: for
    tests.
    """
    kv_aware: KvAwareSpec = KvAwareSpec()
    capacity_aware: CapacityAwareSpec = CapacityAwareSpec()
    latency_aware: LatencyAwareSpec = LatencyAwareSpec()


PREFILL_PARTS = ("offload", "prefill_score", "prefill_queue", "credits")
"""Sections that mean something beside prefill workers alone."""


class RoutingSpec(SpecSection):
    """Policy of where a request and its prefill run; takes effect without a restart."""

    offload: OffloadSpec = OffloadSpec()
    prefill_score: PrefillScoreSpec = PrefillScoreSpec()
    prefill_queue: PrefillQueueSpec = PrefillQueueSpec()
    credits: CreditsSpec = CreditsSpec()
    moving: MovingSpec = MovingSpec()
    racing: RacingSpec = RacingSpec()
    relaying: RelayingSpec = RelayingSpec()
    decode_score: DecodeScoreSpec = DecodeScoreSpec()
    branches: Literal["Local", "Spread"] = "Local"
    """The choices of one prompt (n above 1): Local = on one worker, Spread = over several where
    that one is busy and answers are long.
    """
