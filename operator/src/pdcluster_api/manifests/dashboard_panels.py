"""Panels of the dashboard, in the order of a look: users, waiting requests, movement, cost.

Units are Grafana's names of them; expressions are templates of `promql`.
"""

from dataclasses import dataclass

from pdcluster_api.manifests.promql import quantile

_WINDOW = "$__rate_interval"
_BY = "role, pool"
_POOL = "{{role}}/{{pool}}"


@dataclass(frozen=True)
class Query:
    """One set of lines.  legend: a template over the series' labels."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph.

    needs_prefill:    only where there is a prefill role
    needs_autoscaler: only where it is not off; the operator's own metrics show it, where they are scraped
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    needs_prefill: bool = False
    needs_autoscaler: bool = False


def panels_of(ingress_role: str, *, is_autoscaled: bool) -> tuple[Panel, ...]:
    """The panels that make sense for a cluster with this ingress role, with or without the autoscaler."""
    fitting = (panel for panel in PANELS if ingress_role == "decode" or not panel.needs_prefill)
    return tuple(panel for panel in fitting if is_autoscaled or not panel.needs_autoscaler)


def _quantiles(histogram: str, by: str = "", legend: str = "") -> tuple[Query, ...]:
    shares = (0.5, 0.95, 0.99)
    return tuple(Query(quantile(share, histogram, _WINDOW, by), f"p{share * 100:g}{legend}") for share in shares)


def _total(metric: str, by: str = _BY, legend: str = _POOL) -> tuple[Query, ...]:
    """A gauge, summed."""
    return (Query(f"sum by ({by}) (pdcluster_{metric}{{$scope}})", legend),)


def _mean(metric: str) -> tuple[Query, ...]:
    """A gauge, averaged over the workers of a pool."""
    return (Query(f"avg by ({_BY}) (pdcluster_{metric}{{$scope}})", _POOL),)


def _rate(metric: str, by: str = _BY, legend: str = _POOL) -> Query:
    """A counter, per second."""
    return Query(f"sum by ({by}) (rate(pdcluster_{metric}_total{{$scope}}[{_WINDOW}]))", legend)


_PHASES = Query(quantile(0.95, "ttft_phase_seconds", _WINDOW, "phase"), "{{phase}}")
_STEPS = Query(quantile(0.95, "engine_step_seconds", _WINDOW, "role, pool, kind"), "{{role}}/{{pool}} {{kind}}")
_PEERS = Query("max by (exported_role, state) (pdcluster_peers{$scope})", "{{exported_role}} {{state}}")
_RATE = Query("quantile by (transport) (0.5, pdcluster_kv_transfer_bytes_per_second{$scope})", "{{transport}}")
_TRANSPORTS = Query("count by (transport) (pdcluster_kv_transport_info{$scope})", "workers with {{transport}}")
_DTYPES = Query("count by (dtype, native) (pdcluster_engine_dtype_info{$scope})", "{{dtype}}, native {{native}}")
_PREFIX_HITS = Query(f"{_rate('prefix_cache_hit_tokens').expression} / {_rate('prefix_cache_query_tokens').expression}", _POOL)
_RIGHT_DRAFTS = Query(f"{_rate('spec_decode_accepted_tokens').expression} / {_rate('spec_decode_draft_tokens').expression}", _POOL)
_CONSTRAINED = (_rate("structured_requests", "kind", "{{kind}}"), _rate("grammar_cache_hits", legend=f"{_POOL} known"))
_ENGINE_TIME = tuple(
    _rate(metric, legend=f"{_POOL} {word}")
    for metric, word in (("prefill_seconds", "prefill"), ("decode_seconds", "decode"), ("engine_overhead_seconds", "overhead"))
)

_STEP_REQUESTS = _quantiles("engine_step_requests", _BY, f" {_POOL}")
_STEP_TOKENS = Query(quantile(0.95, "engine_step_tokens", _WINDOW, f"{_BY}, kind"), f"{_POOL} {{{{kind}}}}")
_KINDS = Query(f"sum by ({_BY}, kind) (rate(pdcluster_engine_step_tokens_sum{{$scope}}[{_WINDOW}]))", f"{_POOL} {{{{kind}}}}")
_PHASE_TIME = _rate("engine_phase_seconds", f"{_BY}, phase", f"{_POOL} {{{{phase}}}}")
_FAILED_ROWS = _rate("engine_failed_rows", "reason", "{{reason}}")

_DEVICES = Query(f"count by ({_BY}, device, name) (pdcluster_engine_device_info{{$scope}})", f"{_POOL} {{{{device}}}} {{{{name}}}}")
_SCHEDULERS = Query(
    f"count by ({_BY}, scheduler, policy) (pdcluster_engine_scheduler_info{{$scope}})", f"{_POOL} {{{{scheduler}}}} {{{{policy}}}}"
)


def _objectives(matching: str) -> str:
    return f"sum by (objective, priority) (rate(pdcluster_qos_slo_total{{{matching}}}[{_WINDOW}]))"


_MET = _objectives('$scope,outcome="met"')
_SLO_MET = Query(f"{_MET} / {_objectives('$scope')}", "{{objective}} {{priority}}")
_ESTIMATES = tuple(
    Query(f"max by ({_BY}) (pdcluster_qos_estimated_{name}_seconds{{$scope}})", f"{_POOL} {name.upper()}") for name in ("ttft", "tpot")
)

_USERS = (
    Panel("Time to first token", "Arrival to first token, at the ingress.", "s", _quantiles("time_to_first_token_seconds")),
    Panel("Time per output token", "Per request, without its first token.", "s", _quantiles("time_per_output_token_seconds")),
    Panel("Inter-token latency", "Each gap between two tokens.", "s", _quantiles("inter_token_latency_seconds")),
    Panel("Request latency", "Arrival to last token.", "s", _quantiles("e2e_request_latency_seconds")),
    Panel("Parts of the time to first token", "p95 of each; their sum is not the p95 of the whole.", "s", (_PHASES,)),
    Panel("Requests that ended well", "By how.", "reqps", (_rate("request_success", "finish_reason", "{{finish_reason}}"),)),
    Panel("Requests refused", "Before any work, by reason.", "reqps", (_rate("request_rejected", "reason", "{{reason}}"),)),
    Panel("Objectives met", "Share of choices, by priority.", "percentunit", (_SLO_MET,)),
    Panel("Requests taken", "By priority.", "reqps", (_rate("qos_admitted", "priority", "{{priority}}"),)),
    Panel("Refused by priority", "And reason.", "reqps", (_rate("qos_rejected", "priority, reason", "{{priority}} {{reason}}"),)),
    Panel("Degraded", "What choices lost under load.", "reqps", (_rate("qos_degraded", "priority, reason", "{{priority}} {{reason}}"),)),
    Panel(
        "Errors of estimates",
        "As a share of what came of them.",
        "percentunit",
        _quantiles("estimate_error_ratio", "quantity", " {{quantity}}"),
    ),
    Panel("Races", "Per second, by whose first token came first.", "reqps", (_rate("races", "winner", "{{winner}}"),)),
    Panel("Prompt tokens lost in races", "At most, per second.", "short", (_rate("race_wasted_tokens"),)),
    Panel("Choices that moved", "Per second.", "reqps", (_rate("request_moves", "reason, outcome", "{{reason}} {{outcome}}"),)),
    Panel(
        "KV read from the worker that was left",
        "Requests per second, by outcome.",
        "reqps",
        (_rate("kv_handovers", "outcome", "{{outcome}}"),),
    ),
    Panel("Estimates", "Of a request that came now, the worst worker of a pool; admission goes by them.", "s", _ESTIMATES),
)
_QUEUES = (
    Panel("Requests running", "In the engines.", "short", _total("num_requests_running")),
    Panel("Requests waiting", "For the engines.", "short", _total("num_requests_waiting")),
    Panel("Prefill queue, requests", "Each pool's part; the sum is the queue.", "short", _total("prefill_queue_requests")),
    Panel("Prefill queue, tokens", "Each pool's part; the sum is the queue.", "short", _total("prefill_queue_tokens")),
    Panel("Prompt tokens", "Of admitted requests, per second.", "short", (_rate("prompt_tokens"),)),
    Panel("Tokens prefilled", "Computed, per second.", "short", (_rate("prefill_tokens"),)),
    Panel("Tokens generated", "Per second.", "short", (_rate("generation_tokens"),)),
)
_TRANSFERS = (
    Panel("Remote prefills", "By outcome, at the decode workers.", "reqps", (_rate("remote_prefill", "outcome", "{{outcome}}"),), True),
    Panel(
        "Long prompts",
        "By where they were prefilled: at a prefill worker, or at the decode worker itself.",
        "reqps",
        (_rate("long_prompts", "prefill", "{{prefill}}"),),
        needs_prefill=True,
    ),
    Panel("Waits for a credit", "Of remote prefills, with that for blocks.", "s", _quantiles("credit_wait_seconds"), True),
    Panel("Credits", "Waits per second, by their end.", "reqps", (_rate("credit_requests", "outcome", "{{outcome}}"),), True),
    Panel("Wants", "Requests that wait for a credit at a prefill worker.", "short", _total("credit_wants"), True),
    Panel("Tokens of credits", "Promised, and in hand.", "short", _total("credit_tokens"), True),
    Panel("Prompts granted together", "At the prefill workers.", "short", _quantiles("prefill_group_requests"), True),
    Panel("KV moved", "Per second and direction.", "Bps", (_rate("kv_transfer_bytes", "direction", "{{direction}}"),), True),
    Panel("KV transfer", "First write to last acknowledgement.", "s", _quantiles("kv_transfer_seconds"), True),
    Panel(
        "Remote prefills at the prefill worker",
        "Its queue, its prefill, both with their messages (first_token), and the transfer.",
        "s",
        _quantiles("remote_prefill_phase_seconds", "phase", " {{phase}}"),
        needs_prefill=True,
    ),
    Panel(
        "KV transfer rate",
        "Of the last transfer of each prefill worker, while something was under way; the middle one.",
        "Bps",
        (_RATE, _TRANSPORTS),
        needs_prefill=True,
    ),
    Panel("Pairs refused", "By reason, per second.", "short", (_rate("peer_refused", "reason", "{{reason}}"),), True),
    Panel("Fences overdue", "Their blocks stay out of use.", "short", _total("fences_overdue"), True),
    Panel("Peers", "The most that any worker sees.", "short", (_PEERS,)),
)
_ENGINES = (
    Panel("KV cache usage", "Share of blocks with tokens of live requests.", "percentunit", _mean("kv_cache_usage_ratio")),
    Panel("KV blocks", "By state; quarantined ones wait for a fence.", "short", _total("kv_blocks", "role, state", "{{role}} {{state}}")),
    Panel("Prefix cache hits", "Share of looked up tokens.", "percentunit", (_PREFIX_HITS,)),
    Panel("Prefix cache evictions", "Cached blocks taken for other tokens, per second.", "short", (_rate("prefix_cache_evictions"),)),
    Panel("Preemptions", "Per second.", "short", (_rate("preemptions"),)),
    Panel("Drafts that were right", "Share of the guessed tokens of speculative decoding.", "percentunit", (_RIGHT_DRAFTS,)),
    Panel("Tokens of a step with drafts", "Of one request: 1 where no guess was right.", "short", _quantiles("spec_decode_emitted_tokens")),
    Panel("Requests with a constraint", "Per second, by kind; and those whose constraint was compiled before.", "reqps", _CONSTRAINED),
    Panel(
        "Compiling a constraint", "Beside the engine, by outcome.", "s", _quantiles("grammar_compile_seconds", "outcome", " {{outcome}}")
    ),
    Panel("Engines that serve", "Processes of all workers.", "short", _total("engine_up")),
    Panel(
        "Requests by engine",
        "Of workers with several: how evenly they are given work.",
        "reqps",
        (_rate("engine_requests", "engine", "engine {{engine}}"),),
    ),
    Panel("Engines started again", "Per second.", "short", (_rate("engine_restarts"),)),
    Panel("Prefill delayer", "Passes per second, by reason.", "short", (_rate("prefill_delayer_outcomes", "reason", "{{reason}}"),), True),
    Panel("Prompts held back", "By the prefill delayer.", "s", _quantiles("prefill_delayer_wait_seconds"), True),
    Panel("Passes held back", "By the prefill delayer.", "short", _quantiles("prefill_delayer_wait_passes"), True),
    Panel("Engine busy", "Share of time in a step.", "percentunit", _mean("engine_busy_ratio")),
    Panel("Engine step", "p95, by kind of step.", "s", (_STEPS,)),
    Panel("Engine steps", "Per second.", "short", (_rate("engine_steps"),)),
    Panel("Requests in a step", "Of steps that ran the model.", "short", _STEP_REQUESTS),
    Panel("Tokens in a step", "p95, by kind; of the steps that have some of it.", "short", (_STEP_TOKENS,)),
    Panel("Tokens computed", "Per second, by kind; recomputed ones were lost to a preemption.", "short", (_KINDS,)),
    Panel("Devices", "Workers by what their engines compute on.", "short", (_DEVICES,)),
    Panel("Schedulers", "Workers by what schedules their engines.", "short", (_SCHEDULERS,)),
    Panel("GPU memory", "Of all processes, and in all.", "bytes", _total("device_memory_bytes", f"{_BY}, state", f"{_POOL} {{{{state}}}}")),
    Panel("GPU utilization", "Time in which a kernel ran, mean of the pool.", "percentunit", _mean("device_utilization_ratio")),
    Panel("Engine dtype", "Workers by what they compute in, and whether their CPU does so natively.", "short", (_DTYPES,)),
    Panel("Engine time", "Seconds per second: on prefill, on decode, outside the model.", "percentunit", _ENGINE_TIME),
    Panel("Time in the model", "Seconds per second: its inputs, the forward pass, sampling.", "percentunit", (_PHASE_TIME,)),
    Panel("Requests that failed in the model", "Per second, by reason.", "short", (_FAILED_ROWS,)),
)


def _operator(metric: str, by: str, legend: str, over: str = "max") -> Query:
    """A gauge of the operator's; one replica of it has any."""
    return Query(f"{over} by ({by}) (pdcluster_operator_{metric}{{$scope}})", legend)


def _counted(metric: str, by: str = "", legend: str = "") -> Query:
    """Increase of one of the operator's counters."""
    over = f"sum by ({by})" if by else "sum"
    return Query(f"{over} (increase(pdcluster_operator_{metric}_total{{$scope}}[{_WINDOW}]))", legend)


_READY = Query(f"count by ({_BY}) (pdcluster_num_requests_running{{$scope}})", f"{_POOL} scraped")
_SIZES = (
    Panel(
        "Workers",
        "That the autoscaler's last decision asks for, or recommends, and those that answer Prometheus.",
        "short",
        (_operator("autoscale_replicas", _BY, f"{_POOL} asked for"), _READY),
        needs_autoscaler=True,
    ),
    Panel(
        "Autoscaler, decisions",
        "That changed something; `pdctl why` tells them.",
        "short",
        (_counted("autoscale_changes", legend="changes"),),
        needs_autoscaler=True,
    ),
    Panel(
        "In the autoscaler's way",
        "By reason, each of which is a condition.",
        "short",
        (_operator("autoscale_problems", "reason", "{{reason}}"),),
        needs_autoscaler=True,
    ),
    Panel(
        "Autoscaler, age of the newest numbers",
        "Seconds since a worker of the pool last gave good ones.",
        "s",
        (_operator("pool_sample_age_seconds", _BY, _POOL),),
        needs_autoscaler=True,
    ),
    Panel(
        "Autoscaler, workers read",
        "Stale ones have missed too many scrapes.",
        "short",
        (_operator("pool_scraped_workers", f"{_BY}, state", f"{_POOL} {{{{state}}}}"),),
        needs_autoscaler=True,
    ),
    Panel(
        "Autoscaler, scrapes without numbers",
        "By reason.",
        "short",
        (_counted("scrape_misses", "reason", "{{reason}}"),),
        needs_autoscaler=True,
    ),
    Panel("Drains", "Requests and transfers that workers which are to go still hold.", "short", _total("draining")),
    Panel(
        "Drains cut",
        "Workers that went before they had drained, by drainTimeoutSeconds.",
        "short",
        (_counted("drains_cut", legend="workers"),),
    ),
)
PANELS = (*_USERS, *_QUEUES, *_TRANSFERS, *_ENGINES, *_SIZES)
