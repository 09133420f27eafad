"""Table of the worker's Prometheus metrics.

Names are those of docs/contracts.md (`tests/contract`).  Engine counters arrive as cumulative
values in EngineStats and are moved forward by their difference (`serving.engines.metrics`).
"""

from collections.abc import Callable
from typing import get_args

from prometheus_client import CollectorRegistry

from pdcluster_schema.qos import Tier
from pdcluster_worker.messages.engine import RAISED, ROW_FAILURES, TIER_LOOKUPS, TIER_READS
from pdcluster_worker.messages.engine_settings import MOST_DRAFTS
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.requests import ConstraintKind, FinishReason
from pdcluster_worker.metrics.collectors import (
    GpuCollector,
    counter,
    declared,
    gauge,
    histogram,
    register_declared,
    token_histogram,
)
from pdcluster_worker.system.nvidia import GpuUse

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
# 28 and 29: one below the default bound, and it.
_PASSES = (0, 5, 10, 20, 28, 29, 50, 100, 500, 1000, 9999)
# The source's, and shorter ones.
_DELAYS = (
    *(0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)

_TIERS = get_args(Tier)
_QOS_REASONS = (
    *("slo_ttft", "slo_tpot", "prompt_limit", "prefill_barred", "waited_too_long", "displaced"),
    *("tenant_requests", "tenant_concurrency", "tenant_tokens"),
)
_QOS_REJECTIONS = [(reason, tier) for tier in _TIERS for reason in (*_QOS_REASONS, "queue_full")]
_SLO_OUTCOMES = [
    (objective, tier, outcome)
    for tier in _TIERS
    for objective in ("ttft", "tpot")
    for outcome in ("met", "missed")
]
_REJECTIONS = (
    *("queue_full", "bodies_full", "connections_full", "body_timeout"),
    *("draining", "not_ready", "no_prefill_worker", "no_decode_worker", "deadline_unmeetable"),
    "model_unavailable",
    *_QOS_REASONS,
    *("invalid_request", "invalid_api_key", "model_not_found", "context_length_exceeded"),
    "body_too_large",
)


class Metrics:
    """One registry, and a metric in it for each attribute, `pdcluster_` before its name.

    block_size: gives the tokens of one KV block; no metric of ours.
    """

    # a router
    held_requests = gauge("requests that this router holds until a decode worker takes requests")
    relaying_requests = gauge("requests that this router has relayed and that run")
    relayed_requests = counter(
        "requests that this router relayed; cut: the worker broke off, not_taken: no worker "
        "took it and the router served it itself",
        "outcome",
        first=("answered", "cut", "client_gone", "not_taken"),
    )
    relay_retries = counter(
        "times that a worker failed a request before its answer began",
        "reason",
        first=("connect", "stale", "lost", "draining", "not_http"),
    )
    unrelayed_requests = counter(
        "requests that a relaying router served itself, by reason",
        "reason",
        first=("route", "form", "key", "size", "slow", "crowd", "worker"),
    )

    # models of other clusters
    handed_on_requests = counter(
        "requests for models of other clusters that were handed on; refused: in place of a smaller "
        "model's answer the client got its own model's refusal",
        "model",
        "outcome",
    )

    # an endpoint picker
    picker_endpoints = gauge("workers that this picker chooses among")
    picked_requests = counter(
        "requests of gateways that this picker chose a worker for; refused: none took requests",
        "outcome",
        first=("picked", "refused"),
    )

    # credits, which a remote prefill waits for
    prefill_group_requests = histogram(
        "requests that were granted a credit together, at the prefill side", buckets=_REQUESTS
    )
    credit_wants = gauge(
        "requests that wait for a credit here; each waits at every prefill worker that may take it"
    )
    credit_tokens = gauge("tokens of credits that are out, and of work in hand")
    credit_requests = counter(
        "waits for a credit by outcome, at the decode side",
        "outcome",
        first=("granted", "no_prefill_worker", "cancelled"),
    )
    credit_wait_seconds = histogram("a remote prefill's wait for a credit and for blocks here")

    # remote prefills
    remote_prefill = counter(
        "remote prefills by outcome, at the decode side",
        "outcome",
        first=("ok", "failed", "stalled", "cancelled"),
    )
    remote_prefill_phase_seconds = histogram(
        "remote prefills at the prefill worker: queue and prefill, both with messages "
        "(first_token), and transfer",
        "phase",
    )
    long_prompts = counter(
        "prompts worth a remote prefill, by where it ran, at the decode side",
        "prefill",
        first=("remote", "local"),
    )
    prefill_queue_requests = gauge("this worker's part of the prefill queue")
    prefill_queue_tokens = gauge("this worker's part of the prefill queue, in tokens")
    request_branches = counter(
        "choices after the first of a prompt, by their worker: home has run the first one",
        "place",
        first=("home", "moved"),
    )
    races = counter("requests raced on two workers, by the winner of the first token", "winner")
    race_wasted_tokens = counter(
        "prompt tokens of the losers of races, of which some were never computed"
    )
    role_info = gauge("1 for the role that this worker has now", "role")
    role_changes = counter("roles taken by a command", "role", first=("prefill", "decode"))
    peers = gauge("known peers by role and state", "role", "state")
    peer_refused = counter(
        "pairs refused by the handshake",
        "reason",
        first=("kv_geometry", "weights", "revision", "tensor_parallel", "operations"),
    )

    # KV blocks: states, prefix cache, transfers
    kv_cache_usage_ratio = gauge("share of KV blocks that hold a live request's tokens")
    kv_blocks = gauge("KV blocks by state", "state")
    fences_overdue = gauge(
        "fences that have not been answered in time; their blocks stay quarantined"
    )
    prefix_cache_query_tokens = counter("tokens looked up in the prefix cache")
    prefix_cache_hit_tokens = counter("tokens found in the prefix cache")
    prefix_cache_evictions = counter("cached KV blocks taken for other tokens")
    kv_tier_blocks = gauge(
        "KV blocks of the tiers below the pool: stored ones, and all that there is room for",
        *("tier", "state"),
    )
    kv_tier_bytes = counter("KV bytes copied to a tier and from it", "tier", "direction")
    kv_tier_evictions = counter("KV blocks that left a tier for others", "tier")
    kv_tier_damaged_blocks = counter("KV blocks that were not whole in a tier when read", "tier")
    kv_tier_absent_blocks = counter(
        "KV blocks that others had deleted from a shared tier when read", "tier"
    )
    kv_tier_failures = counter(
        "copies and lookups that a tier refused or did not answer in time", "tier"
    )
    kv_tier_stopped = gauge(
        "engines whose tier takes no blocks or is not read now, as on a full disk", "tier"
    )
    kv_tier_reads = counter(
        "prefixes that tiers had; read: from there, slow: so, in more time than to compute them, "
        "lost: no block was whole or still there, computed: since that was expected to be faster, "
        "given_up: since reading took too long",
        "choice",
        first=TIER_READS,
    )
    kv_tier_lookups = counter(
        "prefixes that a shared tier was asked for; late: it was not waited for",
        "outcome",
        first=TIER_LOOKUPS,
    )
    kv_transfer_seconds = histogram("first write to last acknowledgement of one request's KV")
    kv_transfer_bytes = counter("KV bytes moved", "direction", first=("sent", "received"))
    kv_transfer_bytes_per_second = gauge("rate of the last KV transfer from here", "transport")
    kv_transport_info = gauge(
        "always 1; its label names the transport of the last KV, at first the one it has",
        "transport",
    )
    kv_transport_fallbacks = counter(
        "KV transfers from here that another transport moved than engine.transport asks for"
    )
    kv_verifications = counter(
        "verifications of a KV transfer to here, by outcome",
        "outcome",
        first=("verified", "failed", "postponed"),
    )
    kv_prefixes_given = counter(
        "prefixes whose KV this decode worker offered to a prefill worker that lacked it",
        "outcome",
        first=("ok", "refused", "failed"),
    )
    kv_prefixes_taken = counter("prefixes whose KV this prefill worker took from a decode worker")
    kv_handovers = counter(
        "requests that read their KV from another decode worker, by outcome",
        "outcome",
        first=("ok", "failed", "stalled", "cancelled"),
    )

    # device of the engine
    engine_device_info = gauge(
        "always 1; its labels name the device of the engine", "device", "name"
    )
    engine_dtype_info = gauge(
        "always 1; its labels name the dtype of the engine", "dtype", "native"
    )
    _gpus = declared(GpuCollector)

    # engine processes of this worker
    engine_busy_ratio = gauge("share of the last seconds spent in a step")
    engine_stalled = gauge("1 while the engine makes no progress, else 0")
    engine_up = gauge("1 while that engine process of this worker serves, else 0", "engine")
    engine_requests = counter("requests given to each engine process of this worker", "engine")
    engine_restarts = counter(
        "engine processes started again beside others that served on", "engine"
    )

    # drafted tokens, by position among the drafts of a request in one step, from 0
    spec_decode_draft_tokens = counter("drafted tokens that were verified", "position")
    spec_decode_accepted_tokens = counter("drafted tokens that were right", "position")
    spec_decode_emitted_tokens = histogram(
        "tokens that a request got of a step with drafts of it", buckets=range(1, MOST_DRAFTS + 2)
    )

    # engine steps
    engine_step_seconds = histogram("one engine step", "kind")
    engine_step_requests = histogram("requests in one engine step", buckets=_REQUESTS)
    engine_step_tokens = histogram(
        "tokens in one engine step, of each kind that it has", "kind", buckets=_TOKENS
    )
    engine_steps = counter("engine steps")
    prefill_seconds = counter("engine time spent on prefill tokens")
    decode_seconds = counter("engine time spent on decode tokens")
    engine_overhead_seconds = counter("engine time spent outside the model")
    engine_phase_seconds = counter(
        "engine time inside the model, by phase", "phase", first=("inputs", "forward", "sample")
    )
    engine_failed_rows = counter(
        "requests that failed in a step of the model, by reason",
        "reason",
        first=(*ROW_FAILURES, RAISED),
    )

    # scheduler
    engine_scheduler_info = gauge(
        "always 1; its labels name the scheduler of the engine", "scheduler", "policy"
    )
    preemptions = counter("requests preempted to recompute")
    prefill_delayer_outcomes = counter(
        "passes of the prefill delayer", "prefillable", "allowed", "reason", "executed"
    )
    prefill_delayer_wait_passes = histogram(
        "passes for which prompts were held back", buckets=_PASSES
    )
    prefill_delayer_wait_seconds = histogram(
        "time for which prompts were held back", buckets=_DELAYS
    )

    # constraints on answers
    structured_requests = counter(
        "requests with a constraint on their answer", "kind", first=get_args(ConstraintKind)
    )
    grammar_cache_hits = counter("of these, those whose constraint was compiled before")
    grammar_compile_seconds = histogram("one constraint, compiled beside the engine", "outcome")

    # quality of service, by priority
    qos_admitted = counter(
        "prompts that were taken, with all their choices", "priority", first=_TIERS
    )
    qos_rejected = counter(
        "requests refused by a worker, before or while they waited",
        "reason",
        "priority",
        first=_QOS_REJECTIONS,
    )
    qos_degraded = counter("choices that were degraded under load, by reason", "reason", "priority")
    deferred_groups = counter(
        "request groups that began to wait for others, since these can then be in time"
    )
    qos_estimated_ttft_seconds = gauge("wait for the first token of a request that comes now")
    qos_estimated_tpot_seconds = gauge("time per output token if one more stream joins")
    qos_slo = counter(
        "choices whose TTFT or TPOT met or missed its objective",
        "objective",
        "priority",
        "outcome",
        first=_SLO_OUTCOMES,
    )

    # requests
    num_requests_running = gauge("requests in the engine's running set; each of n choices is one")
    num_requests_waiting = gauge(
        "requests that wait for this worker's engine; each of n choices is one"
    )
    request_success = counter(
        "choices that completed, n of a request, at the worker that its client asked",
        "finish_reason",
        first=get_args(FinishReason),
    )
    request_rejected = counter("requests refused before any work", "reason", first=_REJECTIONS)
    request_moves = counter(
        "started choices that left their worker, by reason and outcome", "reason", "outcome"
    )
    draining = gauge(
        "requests, transfers and then clients that a draining worker still waits for; "
        "0 when it does not drain"
    )
    prompt_tokens = counter(
        "prompt tokens of requests that the engine admitted: once for each of n choices, and "
        "of a remote prefill at the decode worker; none of a verification"
    )
    prefill_tokens = counter("prompt tokens computed here, without those that a cache had")
    generation_tokens = counter("tokens sampled here")

    # latencies as clients see them
    time_to_first_token_seconds = histogram("arrival to first token, at the ingress")
    ttft_phase_seconds = histogram("parts of the time to first token", "phase")
    time_per_output_token_seconds = histogram(
        "per request: (end - first token) / (output tokens - 1)"
    )
    inter_token_latency_seconds = token_histogram("each gap between two tokens")
    e2e_request_latency_seconds = histogram("arrival of the request to its last token")
    estimate_error_ratio = histogram(
        "relative error of an estimate made at arrival; its mean is the MAPE",
        "quantity",
        "group",
        buckets=_ERRORS,
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.block_size: Callable[[], int] = lambda: 0
        register_declared(self, self.registry)

    def watch_gpu(self, device: DeviceFacts, use: Callable[[], GpuUse | None]) -> None:
        """Export memory and work of the worker's GPUs, read at each scrape; nothing of a CPU."""
        if device.kind == "cuda":
            self._gpus.device, self._gpus.use = device.name, use
