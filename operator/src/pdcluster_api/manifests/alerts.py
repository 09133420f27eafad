"""The alerts of a cluster: each says what is wrong, for whom, and what a person can do.

Thresholds are about what a chat user notices; an SLO of your own is a rule of
your own over the same metrics.  Severity critical = requests are not answered,
warning = they are slower than they could be, or soon will be.
"""

from dataclasses import dataclass

from pdcluster_api.manifests.promql import share_above

TTFT_BOUND = "2.5"  # seconds; a bucket's bound, as is the next
TPOT_BOUND = "0.1"
QUEUE_BOUND = "1.0"
_ALLOWED = 0.05  # share of requests above the bound
_BURNING = 6 * _ALLOWED  # in a long and a short window: it is bad, and it is still going on


@dataclass(frozen=True)
class Alert:
    """One rule.

    expression:    a template of `promql`
    lasting:       how long it must hold
    runbook:       what to look at and what to change
    needs_prefill: only where there is a prefill role
    needs_autoscaler: only where it is not off; the operator's own metrics say it, where they are scraped
    needs_routers: only where routers answer clients
    """

    name: str
    severity: str
    lasting: str
    expression: str
    summary: str
    description: str
    runbook: str
    needs_prefill: bool = False
    needs_autoscaler: bool = False
    needs_routers: bool = False


def alerts_of(decode_role: str, *, has_routers: bool, is_autoscaled: bool) -> tuple[Alert, ...]:
    """The alerts that make sense for a cluster with this decode role, with or without routers and the autoscaler."""
    fitting = (alert for alert in ALERTS if decode_role == "decode" or not alert.needs_prefill)
    fitting = (alert for alert in fitting if has_routers or not alert.needs_routers)
    return tuple(alert for alert in fitting if is_autoscaled or not alert.needs_autoscaler)


def _in_the_way(reasons: str) -> str:
    return f'max by (reason) (pdcluster_operator_autoscale_problems{{$scope,reason=~"{reasons}"}}) > 0'


def _burning(histogram: str, bound: str) -> str:
    return " and ".join(f"{share_above(histogram, bound, window)} > {_BURNING:g}" for window in ("1h", "5m"))


_SCALE = "(kubectl scale pdps/...; with autoscale.mode On its maxReplicas or the budget, see `pdctl why`)"
_REASONS = "queue_full|bodies_full|connections_full|draining|not_ready|no_prefill_worker|no_decode_worker"
_REFUSED = f'sum(rate(pdcluster_request_rejected_total{{$scope,reason=~"{_REASONS}"}}[5m]))'
_SUCCEEDED = "(sum(rate(pdcluster_request_success_total{$scope}[5m])) or vector(0))"  # no series before the first success
_QUEUE = "sum(pdcluster_prefill_queue_tokens{$scope})"
_PREFILLS = "sum(rate(pdcluster_remote_prefill_total{$scope}[10m]))"
_FAILED_PREFILLS = 'sum(rate(pdcluster_remote_prefill_total{$scope,outcome=~"failed|stalled"}[10m]))'
_LONG_PROMPTS = "sum(rate(pdcluster_long_prompts_total{$scope}[10m]))"
_LOCAL_PROMPTS = 'sum(rate(pdcluster_long_prompts_total{$scope,prefill="local"}[10m]))'
_READY_PREFILL_PEERS = 'pdcluster_peers{$scope,role="$ingress",exported_role="prefill",state="ready"}'
_HIGH_TTFT = 'sum(rate(pdcluster_qos_slo_total{$scope,objective="ttft",priority="high"}[10m]))'
_HIGH_TTFT_MISSED = 'sum(rate(pdcluster_qos_slo_total{$scope,objective="ttft",priority="high",outcome="missed"}[10m]))'
_LOW_REFUSED = 'sum(rate(pdcluster_qos_rejected_total{$scope,priority="low"}[30m]))'
_LOW_TAKEN = '(sum(rate(pdcluster_qos_admitted_total{$scope,priority="low"}[30m])) or vector(0))'
_INGRESS_WORKERS = 'pdcluster_num_requests_running{$scope,role="$ingress"}'
_COMPUTED = "sum by (role, pool) (rate(pdcluster_engine_step_tokens_sum{$scope}[10m]))"
_RECOMPUTED = 'sum by (role, pool) (rate(pdcluster_engine_step_tokens_sum{$scope,kind="recomputed"}[10m]))'
_QUEUES = 'sum(rate(pdcluster_remote_prefill_phase_seconds_count{$scope,phase="queue"}[10m]))'
_SHORT_QUEUES = f'sum(rate(pdcluster_remote_prefill_phase_seconds_bucket{{$scope,phase="queue",le="{QUEUE_BOUND}"}}[10m]))'
_QUARANTINED = 'sum by (pod) (pdcluster_kv_blocks{$scope,state="quarantined"})'

ALERTS = (
    Alert(
        name="PDClusterNoIngressWorker",
        severity="critical",
        lasting="2m",
        expression=f"absent({_INGRESS_WORKERS})",
        summary="no worker answers requests",
        description="Prometheus has seen no metrics of an ingress worker for 2 minutes: requests to the Service fail.",
        runbook="kubectl describe pdc: the conditions Serving and DecodeReady (or MixedReady) name the reason and the worst pod. "
        "With replicas 0 on purpose, silence this alert.",
    ),
    Alert(
        name="PDClusterNoRouter",
        severity="critical",
        lasting="2m",
        expression='absent(pdcluster_num_requests_running{$scope,role="router"})',
        summary="no router takes requests",
        description="Prometheus has seen no metrics of a router for 2 minutes: requests to the Service fail, whatever runs behind it.",
        runbook="kubectl describe pdc: the conditions Serving and RouterReady name the reason and the worst pod. "
        "With replicas 0 on purpose, silence this alert.",
        needs_routers=True,
    ),
    Alert(
        name="PDClusterRequestsRefused",
        severity="critical",
        lasting="5m",
        expression=f"{_REFUSED} / ({_REFUSED} + {_SUCCEEDED}) > {_ALLOWED:g}",
        summary="requests are answered 503",
        description="More than 5 % of the requests of the last 5 minutes were refused: queues are full, or workers drain or are not ready.",
        runbook=f"Scale the ingress pool {_SCALE}. Raise qos.admission.maxQueuedRequests only if a longer wait is better than a refusal.",
    ),
    Alert(
        name="PDClusterEngineStalled",
        severity="warning",
        lasting="0m",
        # It is 1 for 20 s at most before the worker ends, and scraped every 15 s.
        expression="max by (pod) (max_over_time(pdcluster_engine_stalled{$scope}[10m])) > 0",
        summary="an engine stood still",
        description="The engine of {{ $labels.pod }} had work and made no step, or answered no ping, "
        "for longer than its longest step and qos.stallSeconds. The worker's requests failed or went "
        "elsewhere; unless it got on again, its container was restarted.",
        runbook="`kubectl logs POD --previous` ends with the reason. Once: see the node (memory that "
        "swaps, a device that hangs). Again and again, while steps are slow: raise qos.stallSeconds.",
    ),
    Alert(
        name="PDClusterHighPriorityLate",
        severity="warning",
        lasting="5m",
        expression=f"{_HIGH_TTFT_MISSED} / {_HIGH_TTFT} > {_ALLOWED:g}",
        summary="first tokens of high priority are late",
        description="More than 5 % of the choices of high priority missed their TTFT objective in the last 10 minutes.",
        runbook=f"Scale {_SCALE}; or let less in: qos.earlyRejection for low priority, and limits of qos.tenants for the others. "
        "With engine.schedulingPolicy: preemptive high priority takes the seats of low priority.",
    ),
    Alert(
        name="PDClusterLowPriorityRefused",
        severity="warning",
        lasting="30m",
        expression=f"{_LOW_REFUSED} / ({_LOW_REFUSED} + {_LOW_TAKEN}) > 0.5",
        summary="low priority is hardly served",
        description="More than half of the requests of low priority were refused in the last 30 minutes: there is more load than workers.",
        runbook=f"Scale {_SCALE}; or allow a later first token: raise qos.slo.ttftMilliseconds.",
    ),
    Alert(
        name="PDClusterSlowFirstToken",
        severity="warning",
        lasting="5m",
        expression=_burning("time_to_first_token_seconds", TTFT_BOUND),
        summary="first tokens come late",
        description=f"More than {_BURNING:.0%} of requests waited over {TTFT_BOUND} s for the first token, for an hour and still now.",
        runbook="The dashboard's parts of the time to first token say where it goes: transfer = see the network, "
        f"queue = scale prefill {_SCALE}.",
    ),
    Alert(
        name="PDClusterSlowOutputTokens",
        severity="warning",
        lasting="5m",
        expression=_burning("time_per_output_token_seconds", TPOT_BOUND),
        summary="output tokens come slowly",
        description=f"More than {_BURNING:.0%} of requests took over {TPOT_BOUND} s for each output token, for an hour and still now.",
        runbook=f"Scale decode {_SCALE}; or lower engine.maxSequences or routing.offload.prefillLengthThreshold.",
    ),
    Alert(
        name="PDClusterPrefillQueueGrowing",
        severity="warning",
        lasting="5m",
        # Seconds of work at the present pace; infinite while nothing is computed.
        expression=f"{_QUEUE} / sum(rate(pdcluster_prefill_tokens_total{{$scope}}[5m])) > 30 and {_QUEUE} > 0",
        summary="prompts wait to be computed",
        description="The prefill queue holds more than 30 s of work at the present pace.",
        runbook=f"Scale the pool that prefills {_SCALE}. If it computes nothing at all, see the logs of its pods.",
    ),
    Alert(
        name="PDClusterNoPrefillWorker",
        severity="warning",
        lasting="5m",
        expression=f"absent({_READY_PREFILL_PEERS}) and on() count({_INGRESS_WORKERS})",
        summary="decode workers reach no prefill worker",
        description="No decode worker has a ready prefill peer: every prompt is computed on decode workers, beside their requests.",
        runbook="See the condition PrefillReady. If its pods are ready: a NetworkPolicy that closes port 9000, or pairs that are "
        "refused (pdcluster_peer_refused_total).",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterRemotePrefillFailing",
        severity="warning",
        lasting="5m",
        expression=f"{_FAILED_PREFILLS} / {_PREFILLS} > {_ALLOWED:g}",
        summary="remote prefills fail and are computed again",
        description="More than 5 % of remote prefills failed in the last 10 minutes; decode workers computed those prompts themselves.",
        runbook="The logs of the decode workers say `remote prefill failed` with peer and reason: a pod that dies, or the KV port 9100.",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterNotDisaggregating",
        severity="warning",
        lasting="10m",
        # 1 in 100 s keeps the few first prompts of a cluster, and those of a quiet one, from being a share of anything.
        expression=f"{_LOCAL_PROMPTS} / {_LONG_PROMPTS} > 0.9 and {_LONG_PROMPTS} > 0.01",
        summary="long prompts are prefilled by decode workers",
        description="More than 90 % of the long prompts of the last 10 minutes found no prefill worker: they are computed beside the "
        "requests of decode workers, which slows both.",
        runbook="kubectl describe pdc: the condition Disaggregating names a refused pair and the fix, or where to look; "
        "PrefillReady names prefill workers that are not there.",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterPairRefused",
        severity="warning",
        lasting="0m",
        expression="sum by (reason) (increase(pdcluster_peer_refused_total{$scope}[15m])) > 0",
        summary="two workers refused each other",
        description="A prefill and a decode worker do not fit ({{ $labels.reason }}): no KV moves between them.",
        runbook="The condition Disaggregating, and their logs, say what differs and the fix. Within one revision it is mostly another "
        "model folder somewhere: make them the same.",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterTransferBlocksHeld",
        severity="warning",
        lasting="5m",
        expression="sum by (pod) (pdcluster_fences_overdue{$scope}) > 0",
        summary="KV blocks are held by transfers that do not end",
        description="On {{ $labels.pod }} fences have not returned in time: their blocks stay out of use.",
        runbook="Delete that pod to get its blocks back; if it happens again, look at the network between its node and the senders'.",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterKVCacheFull",
        severity="warning",
        lasting="10m",
        expression='avg by (role, pool) (pdcluster_kv_cache_usage_ratio{$scope,role="$ingress"}) > 0.95',
        summary="the KV cache is full",
        description="Workers of {{ $labels.role }}/{{ $labels.pool }} use more than 95 % of their KV blocks: new requests wait.",
        runbook=f"Scale the pool {_SCALE}, or give each worker more with engine.kvCacheMemory.",
    ),
    Alert(
        name="PDClusterPreemptions",
        severity="warning",
        lasting="10m",
        expression="sum by (role, pool) (rate(pdcluster_preemptions_total{$scope}[10m])) > 0.1",
        summary="requests are preempted and computed again",
        description="Workers of {{ $labels.role }}/{{ $labels.pool }} preempt more than one request in 10 s, for lack of KV blocks.",
        runbook=f"Scale the pool {_SCALE}, raise engine.kvCacheMemory or engine.admissionWatermark, or lower engine.maxSequences.",
    ),
    Alert(
        name="PDClusterRecomputing",
        severity="warning",
        lasting="10m",
        expression=f"{_RECOMPUTED} / {_COMPUTED} > 0.1",
        summary="much is computed twice",
        description="More than 10 % of the tokens that {{ $labels.role }}/{{ $labels.pool }} computes were computed before, "
        "and lost to a preemption.",
        runbook="Give admitted requests room to grow into: raise engine.admissionWatermark (0.05), or engine.kvCacheMemory.",
    ),
    Alert(
        name="PDClusterPrefillWorkersQueue",
        severity="warning",
        lasting="10m",
        expression=f"1 - {_SHORT_QUEUES} / {_QUEUES} > {_BURNING:g}",
        summary="prompts wait at prefill workers that took them",
        description=f"More than {_BURNING:.0%} of remote prefills waited over {QUEUE_BOUND} s in the queue of a prefill worker, "
        "where no other worker can take them any more.",
        runbook=f"Lower routing.credits.batchesAhead, so that they wait where the first free worker takes them; or scale prefill {_SCALE}.",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterBlocksQuarantined",
        severity="warning",
        lasting="5m",
        expression=f"{_QUARANTINED} / sum by (pod) (pdcluster_kv_blocks{{$scope}}) > 0.1",
        summary="KV blocks are out of use",
        description="On {{ $labels.pod }} more than 10 % of the KV blocks wait for transfers that were given up to be fenced.",
        runbook="Prefill workers that die or hang in the middle of transfers: see their logs, and the network to them. "
        "Blocks that stay are those of PDClusterTransferBlocksHeld.",
        needs_prefill=True,
    ),
    Alert(
        name="PDClusterDrainSlow",
        severity="warning",
        lasting="1h",
        expression="max by (pod) (pdcluster_draining{$scope}) > 0",
        summary="a worker has drained for an hour",
        description="{{ $labels.pod }} is to go and still holds requests or transfers; it keeps its accelerator until they end.",
        runbook="It takes as long as its longest answer. rollout.drainTimeoutSeconds sets a limit; `kubectl delete pod` ends it within "
        "rollout.gracePeriodSeconds.",
    ),
    Alert(
        name="PDClusterDrainCut",
        severity="warning",
        lasting="0m",
        expression="sum(increase(pdcluster_operator_drains_cut_total{$scope}[15m])) > 0",
        summary="workers were scaled away before they had drained",
        description="rollout.drainTimeoutSeconds was over: requests that they held ended with them, or within the grace period.",
        runbook="The events DrainCut name the pods. Raise rollout.drainTimeoutSeconds above the time of the longest answer, or remove it.",
    ),
    Alert(
        name="PDClusterAutoscalerMetricsMissing",
        severity="warning",
        lasting="10m",
        expression=_in_the_way("MetricsMissing"),
        summary="the autoscaler gets no numbers",
        description="Ready workers give no numbers that can be used ({{ $labels.reason }}): their role does not shrink, or holds.",
        runbook="See the condition MetricsMissing, pdcluster_operator_scrape_misses_total by reason, and the network between the "
        "operator's pod and port 8000 of the workers.",
        needs_autoscaler=True,
    ),
    Alert(
        name="PDClusterAutoscalerCapacityShort",
        severity="warning",
        lasting="15m",
        expression=_in_the_way("CapacityShort"),
        summary="no node takes the workers that are needed",
        description="The autoscaler needs workers of a type that has no room ({{ $labels.reason }}), and no other pool of the role grows.",
        runbook="The condition CapacityShort names the type and the number: add nodes, free some, or give the role a pool of another type.",
        needs_autoscaler=True,
    ),
    Alert(
        name="PDClusterAutoscalerLimited",
        severity="warning",
        lasting="15m",
        expression=_in_the_way("ScalingLimited"),
        summary="a role needs more workers than its limits allow",
        description="By its metrics a role needs more workers than it may have ({{ $labels.reason }}): requests are slower than need be.",
        runbook="The condition ScalingLimited names the limit: raise the pool's maxReplicas (a schedule may have its own), "
        "autoscale.budget or autoscale.ratio.",
        needs_autoscaler=True,
    ),
    Alert(
        name="PDClusterAutoscalerConfined",
        severity="warning",
        lasting="30m",
        expression=_in_the_way("RatioConstraintViolated|BudgetTooSmall|BoundsConflict"),
        summary="the limits of the autoscaler exclude each other",
        description="{{ $labels.reason }}: no sizes within bounds, budget and ratio exist; the nearest ones are taken.",
        runbook="The condition of that name says which limit to widen: autoscale.ratio, autoscale.budget, or bounds of a pool or schedule.",
        needs_autoscaler=True,
    ),
)
