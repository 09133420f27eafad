"""The worker's Prometheus metrics, each defined once; names are those of docs/contracts.md (`tests/contract`).

Attribute names are metric names without the `pdcluster_` prefix and the
`_total` suffix.  Engine counters arrive as cumulative values in EngineStats
and are moved forward by their difference (`dispatch.engines.metrics`).
"""

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdcluster_worker.config.qos import Tier
from pdcluster_worker.config.speculation import MOST_DRAFTS
from pdcluster_worker.histogram import TokenHistogram
from pdcluster_worker.machine.nvidia import GpuUse
from pdcluster_worker.messages.constraint import ConstraintKind
from pdcluster_worker.messages.engine import RAISED, ROW_FAILURES
from pdcluster_worker.messages.facts import Device
from pdcluster_worker.messages.requests import FinishReason

_QOS_REASONS = (
    *("slo_ttft", "slo_tpot", "prompt_limit", "prefill_barred", "waited_too_long", "displaced"),
    *("tenant_requests", "tenant_concurrency", "tenant_tokens"),
)
_FIRST_VALUES = {
    "kv_transfer_bytes": ("sent", "received"),
    "remote_prefill": ("ok", "failed", "stalled", "cancelled"),
    "long_prompts": ("remote", "local"),
    "kv_handovers": ("ok", "failed", "stalled", "cancelled"),
    "credit_requests": ("granted", "no_prefill_worker", "cancelled"),
    "peer_refused": ("kv_geometry", "weights", "revision", "tensor_parallel", "operations"),
    "request_rejected": (
        *("queue_full", "bodies_full", "connections_full", "body_timeout"),
        *("draining", "not_ready", "no_prefill_worker", "no_decode_worker", "deadline_unmeetable"),
        *_QOS_REASONS,
        *("invalid_request", "invalid_api_key", "model_not_found", "context_length_exceeded", "body_too_large"),
    ),
    "request_success": get_args(FinishReason),
    "engine_phase_seconds": ("inputs", "forward", "sample"),
    "engine_failed_rows": (*ROW_FAILURES, RAISED),
    "structured_requests": get_args(ConstraintKind),
}
"""Label values of counters that are there from the start: the rate of a series that begins at 1 misses what made it 1."""

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)

_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_PASSES = (0, 5, 10, 20, 28, 29, 50, 100, 500, 1000, 9999)  # 28, 29: one below the default bound, and it
_DELAYS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)  # the source's, and shorter ones


class Metrics:
    """One registry and everything in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token_seconds = self._histogram("time_to_first_token_seconds", "arrival to first token, at the ingress")
        self.ttft_phase_seconds = self._histogram("ttft_phase_seconds", "parts of the time to first token", "phase")
        self.time_per_output_token_seconds = self._histogram(
            "time_per_output_token_seconds", "per request: (end - first token) / (output tokens - 1)"
        )
        self.inter_token_latency_seconds = TokenHistogram(
            "pdcluster_inter_token_latency_seconds", "each gap between two tokens", self.registry, _SECONDS
        )
        self.e2e_request_latency_seconds = self._histogram("e2e_request_latency_seconds", "arrival of the request to its last token")
        self.engine_step_seconds = self._histogram("engine_step_seconds", "one engine step", "kind")
        self.estimate_error_ratio = self._histogram(
            "estimate_error_ratio",
            "relative error of an estimate made at arrival; its mean is the MAPE",
            "quantity",
            "group",
            buckets=_ERRORS,
        )
        self.kv_transfer_seconds = self._histogram("kv_transfer_seconds", "first write to last acknowledgement of one request's KV")
        self.remote_prefill_phase_seconds = self._histogram(
            "remote_prefill_phase_seconds",
            "remote prefills at the prefill worker: queue and prefill, both with messages (first_token), and transfer",
            "phase",
        )
        self.prefill_group_requests = self._histogram(
            "prefill_group_requests",
            "requests that were granted a credit together, at the prefill side",
            buckets=_REQUESTS,
        )
        self.credit_wait_seconds = self._histogram("credit_wait_seconds", "a remote prefill's wait for a credit and for blocks here")
        self.engine_step_requests = self._histogram("engine_step_requests", "requests in one engine step", buckets=_REQUESTS)
        self.engine_step_tokens = self._histogram(
            "engine_step_tokens", "tokens in one engine step, of each kind that it has", "kind", buckets=_TOKENS
        )
        self._make_gauges()
        self._make_counters()

    def _make_gauges(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "requests in the engine's running set")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "requests that wait for this worker's engine")
        self.prefill_queue_requests = self._gauge("prefill_queue_requests", "this worker's part of the prefill queue")
        self.prefill_queue_tokens = self._gauge("prefill_queue_tokens", "this worker's part of the prefill queue, in tokens")
        self.credit_wants = self._gauge(
            "credit_wants", "requests that wait for a credit here; each waits at every prefill worker that may take it"
        )
        self.credit_tokens = self._gauge("credit_tokens", "tokens of credits that are out, and of work in hand")
        self.kv_cache_usage_ratio = self._gauge("kv_cache_usage_ratio", "share of KV blocks that hold a live request's tokens")
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks by state", "state")
        self.fences_overdue = self._gauge("fences_overdue", "fences that have not been answered in time; their blocks stay quarantined")
        self.engine_device_info = self._gauge("engine_device_info", "always 1; its labels name the device of the engine", "device", "name")
        self.engine_scheduler_info = self._gauge(
            "engine_scheduler_info", "always 1; its labels name the scheduler of the engine", "scheduler", "policy"
        )
        self.engine_busy_ratio = self._gauge("engine_busy_ratio", "share of the last seconds spent in a step")
        self.engine_stalled = self._gauge("engine_stalled", "1 while the engine makes no progress, else 0")
        self.draining = self._gauge(
            "draining",
            "requests, transfers and then clients that a draining worker still waits for; 0 when it does not drain",
        )
        self.kv_transfer_bytes_per_second = self._gauge(
            "kv_transfer_bytes_per_second", "rate of the last KV transfer from here", "transport"
        )
        self.engine_dtype_info = self._gauge("engine_dtype_info", "always 1; its labels name the dtype of the engine", "dtype", "native")
        self.kv_transport_info = self._gauge("kv_transport_info", "always 1; its label names the transport of KV blocks", "transport")
        self.peers = self._gauge("peers", "known peers by role and state", "role", "state")

    def _make_counters(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of admitted requests")
        self.prefill_tokens = self._counter("prefill_tokens", "prompt tokens computed here")
        self.generation_tokens = self._counter("generation_tokens", "tokens sampled here")
        self.prefill_seconds = self._counter("prefill_seconds", "engine time spent on prefill tokens")
        self.decode_seconds = self._counter("decode_seconds", "engine time spent on decode tokens")
        self.engine_overhead_seconds = self._counter("engine_overhead_seconds", "engine time spent outside the model")
        self.engine_phase_seconds = self._counter("engine_phase_seconds", "engine time inside the model, by phase", "phase")
        self.engine_failed_rows = self._counter("engine_failed_rows", "requests that failed in a step of the model, by reason", "reason")
        self.engine_steps = self._counter("engine_steps", "engine steps")
        self.prefix_cache_query_tokens = self._counter("prefix_cache_query_tokens", "tokens looked up in the prefix cache")
        self.prefix_cache_hit_tokens = self._counter("prefix_cache_hit_tokens", "tokens found in the prefix cache")
        self.prefix_cache_evictions = self._counter("prefix_cache_evictions", "cached KV blocks taken for other tokens")
        self.remote_prefill = self._counter("remote_prefill", "remote prefills by outcome, at the decode side", "outcome")
        self.credit_requests = self._counter("credit_requests", "waits for a credit by outcome, at the decode side", "outcome")
        self.races = self._counter("races", "requests raced on two workers, by the winner of the first token", "winner")
        self.race_wasted_tokens = self._counter(
            "race_wasted_tokens", "prompt tokens of the losers of races, of which some were never computed"
        )
        self.kv_handovers = self._counter(
            "kv_handovers", "requests that moved here and read their KV from the worker that they left, by outcome", "outcome"
        )
        self.request_moves = self._counter(
            "request_moves", "started choices that left their worker, by reason and outcome", "reason", "outcome"
        )
        self.long_prompts = self._counter("long_prompts", "prompts worth a remote prefill, by where it ran, at the decode side", "prefill")
        self.kv_transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes moved", "direction")
        self.preemptions = self._counter("preemptions", "requests preempted to recompute")
        self.request_rejected = self._counter("request_rejected", "requests refused before any work", "reason")
        self.request_success = self._counter("request_success", "requests that completed", "finish_reason")
        self.peer_refused = self._counter("peer_refused", "pairs refused by the handshake", "reason")
        self._add_device()
        self._add_qos()
        self._add_engines()
        self._add_delayer()
        self._add_speculation()
        for name, values in _FIRST_VALUES.items():
            for value in values:
                getattr(self, name).labels(value)

    def _add_engines(self) -> None:
        """Add the metrics of several engine processes of one worker; their ranks are bounded by the setting."""
        self.engine_up = self._gauge("engine_up", "1 while that engine process of this worker serves, else 0", "engine")
        self.engine_requests = self._counter("engine_requests", "requests given to each engine process of this worker", "engine")
        self.engine_restarts = self._counter("engine_restarts", "engine processes started again beside others that served on", "engine")

    def _add_qos(self) -> None:
        """By priority: high, normal or low."""
        self.qos_admitted = self._counter("qos_admitted", "prompts that were taken, with all their choices", "priority")
        self.qos_rejected = self._counter("qos_rejected", "requests refused by a worker, before or while they waited", "reason", "priority")
        self.qos_degraded = self._counter("qos_degraded", "choices that were degraded under load, by reason", "reason", "priority")
        self.qos_estimated_ttft_seconds = self._gauge("qos_estimated_ttft_seconds", "wait for the first token of a request that comes now")
        self.qos_estimated_tpot_seconds = self._gauge("qos_estimated_tpot_seconds", "time per output token if one more stream joins")
        self.qos_slo = self._counter(
            "qos_slo", "choices whose TTFT or TPOT met or missed its objective", "objective", "priority", "outcome"
        )

        for tier in get_args(Tier):
            self.qos_admitted.labels(tier)
            for reason in (*_QOS_REASONS, "queue_full"):
                self.qos_rejected.labels(reason, tier)
            for objective, outcome in product(("ttft", "tpot"), ("met", "missed")):
                self.qos_slo.labels(objective, tier, outcome)

    def _add_device(self) -> None:
        self.device_memory_bytes = self._gauge(
            "device_memory_bytes", "memory of a GPU, by state: used by all of its processes, or total", "device", "state"
        )
        self.device_utilization_ratio = self._gauge("device_utilization_ratio", "share of the last moment with work on a GPU", "device")

    def _add_delayer(self) -> None:
        self.prefill_delayer_outcomes = self._counter(
            "prefill_delayer_outcomes", "passes of the prefill delayer", "prefillable", "allowed", "reason", "executed"
        )
        self.prefill_delayer_wait_passes = Histogram(
            "pdcluster_prefill_delayer_wait_passes", "passes for which prompts were held back", registry=self.registry, buckets=_PASSES
        )
        self.prefill_delayer_wait_seconds = Histogram(
            "pdcluster_prefill_delayer_wait_seconds", "time for which prompts were held back", registry=self.registry, buckets=_DELAYS
        )

    def _add_speculation(self) -> None:
        """By position among the drafts of a request in one step, from 0; their share that was right is the quotient."""
        self.spec_decode_draft_tokens = self._counter("spec_decode_draft_tokens", "drafted tokens that were verified", "position")
        self.spec_decode_accepted_tokens = self._counter("spec_decode_accepted_tokens", "drafted tokens that were right", "position")
        self.spec_decode_emitted_tokens = Histogram(
            "pdcluster_spec_decode_emitted_tokens",
            "tokens that a request got of a step with drafts of it",
            registry=self.registry,
            buckets=range(1, MOST_DRAFTS + 2),
        )
        self.structured_requests = self._counter("structured_requests", "requests with a constraint on their answer", "kind")
        self.grammar_cache_hits = self._counter("grammar_cache_hits", "of these, those whose constraint was compiled before")
        self.grammar_compile_seconds = self._histogram("grammar_compile_seconds", "one constraint, compiled beside the engine", "outcome")

    def watch_gpu(self, device: Device, use: Callable[[], GpuUse | None]) -> None:
        """Export memory and work of a GPU, asked at each scrape; nothing of a CPU or where the driver does not say."""
        if device.kind != "cuda" or use() is None:
            return

        def follow(gauge: Gauge, value: Callable[[GpuUse], float]) -> None:
            gauge.set_function(lambda: math.nan if (now := use()) is None else value(now))

        follow(self.device_memory_bytes.labels(device.name, "used"), lambda now: now.used)
        follow(self.device_memory_bytes.labels(device.name, "total"), lambda now: now.total)
        follow(self.device_utilization_ratio.labels(device.name), lambda now: now.busy)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"pdcluster_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pdcluster_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdcluster_{name}", text, labels, registry=self.registry)
