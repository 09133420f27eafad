"""The greatest value of numbers of a PDCluster, by path: it is taken, and one more is refused."""

COUNT, WEEK, WEIGHT = (1 << 31) - 1, 604_800, 1_000_000

GREATEST: dict[str, int] = {
    "spec.rollout.bakeSeconds": WEEK,
    "spec.rollout.minRequests": COUNT,
    "spec.rollout.gracePeriodSeconds": WEEK,
    "spec.rollout.drainTimeoutSeconds": WEEK,
    "spec.rollout.progressDeadlineSeconds": WEEK,
    "spec.roles.decode.startupTimeoutSeconds": WEEK,
    "spec.autoscale.capacitySeconds": WEEK,
    "spec.autoscale.backoffSeconds": WEEK,
    "spec.autoscale.prefill.ttftSeconds": WEEK,
    "spec.autoscale.decode.tpotSeconds": WEEK,
    "spec.autoscale.objective.queue.seconds": WEEK,
    "spec.autoscale.budget.total": 32_768,
    "spec.autoscale.budget.perGpu.cpu": 32_768,
    "spec.autoscale.cost.cpu": WEIGHT,
    "spec.autoscale.ratio.max": WEIGHT,
    "spec.engine.transferBandwidth": 10**12,
    "spec.engine.fenceTimeoutSeconds": WEEK,
    "spec.engine.maxModelLen": COUNT,
    "spec.qos.admission.maxQueuedRequests": COUNT,
    "spec.qos.tenantDefaults.requestsPerSecond": WEIGHT,
    "spec.qos.tenantDefaults.tokensPerMinute": COUNT,
    "spec.routing.offload.prefillLengthThreshold": COUNT,
}
