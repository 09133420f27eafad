"""Engines whose fields of scheduling are wrong: (change, the model's fault, the API server's
field).
"""

from tests.schema.object_cases import Change, at, both, vllm

CHUNKS = {"low": 32, "high": 128, "stages": 4, "maxTokens": 512}
LATE_GROUPS = {"estimator": "rwt", "allowClientDeadline": True, "lateGroups": "Evict"}

WRONG_SCHEDULING: list[tuple[Change, str, str]] = [
    (
        at("spec.engine.scheduler", "fastest"),
        "spec.engine.scheduler: must be 'continuous', 'sarathi', 'prefill-first', 'orca', "
        "'request-level' or 'simple-ch",
        "spec.engine.scheduler",
    ),
    (
        at("spec.engine.schedulingPolicy", "lifo"),
        "spec.engine.schedulingPolicy: must be 'fcfs', 'priority' or 'preemptive', not 'lifo'",
        "spec.engine.schedulingPolicy",
    ),
    (
        at("spec.engine.longPrefillTokenThreshold", -1),
        "spec.engine.longPrefillTokenThreshold: must be at least 0, not -1; raise it",
        "spec.engine.longPrefillTokenThreshold",
    ),
    (
        at("spec.engine", {"scheduler": "sarathi", "tbtSloMilliseconds": 0}),
        "spec.engine.tbtSloMilliseconds: must be more than 0, not 0; raise it",
        "spec.engine.tbtSloMilliseconds",
    ),
    (
        at("spec.roles.prefill.engine", {"tbtSloMilliseconds": 50}),
        "spec.roles.prefill.engine.tbtSloMilliseconds: is for scheduler: sarathi, not "
        "continuous; leave it out, or set scheduler: sarathi",
        "spec.roles.prefill.engine.tbtSloMilliseconds",
    ),
    (
        at("spec.roles.decode.engine", {"chunkSchedule": CHUNKS}),
        "spec.roles.decode.engine.chunkSchedule: is for scheduler: sarathi, not "
        "continuous; leave it out, or set scheduler: sarathi",
        "spec.roles.decode.engine.chunkSchedule",
    ),
    (
        at("spec.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"low": 129}}),
        "spec.engine.chunkSchedule.low: must be at most high (128), not 129; lower low or raise "
        "high",
        "spec.engine.chunkSchedule.low",
    ),
    (
        at("spec.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"stages": 65}}),
        "spec.engine.chunkSchedule.stages: must be at most 64, not 65; lower it",
        "spec.engine.chunkSchedule.stages",
    ),
    (
        at(
            "spec.roles.decode.engine",
            {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"high": 257}},
        ),
        "spec.roles.decode.engine.chunkSchedule.high: must be at most maxBatchedTokens (256); "
        "lower high or raise",
        "spec.roles.decode.engine.chunkSchedule.high",
    ),
    (
        at("spec.roles.decode.engine", {"scheduler": "orca", "maxModelLen": 257}),
        "spec.roles.decode.engine.maxBatchedTokens: must be at least maxModelLen (257), "
        "since a step computes a whole prompt, not 256; raise maxBatchedTokens or lower "
        "maxModelLen",
        "spec.roles.decode.engine.maxBatchedTokens",
    ),
    (
        at("spec.roles.decode.engine", {"chunkedPrefill": False, "maxModelLen": 300}),
        "spec.roles.decode.engine.maxBatchedTokens: must be at least maxModelLen (300), "
        "since a step computes a whole prompt, not 256; raise maxBatchedTokens or lower "
        "maxModelLen",
        "spec.roles.decode.engine.maxBatchedTokens",
    ),
    (
        at("spec.roles.decode.engine", {"chunkedPrefill": False, "scheduler": "sarathi"}),
        "spec.roles.decode.engine.chunkedPrefill: false is for scheduler: continuous, not "
        "sarathi; leave it out",
        "spec.roles.decode.engine.chunkedPrefill",
    ),
    (
        at("spec.roles.decode.engine", {"longPrefillTokenThreshold": 9, "scheduler": "sarathi"}),
        "spec.roles.decode.engine.longPrefillTokenThreshold: caps the chunks of "
        "scheduler: continuous, and no prompt is cut so here; leave it out",
        "spec.roles.decode.engine.longPrefillTokenThreshold",
    ),
    (
        at("spec.roles.decode.engine", {"longPrefillTokenThreshold": 101, "maxModelLen": 100}),
        "spec.roles.decode.engine.longPrefillTokenThreshold: must be at most maxModelLen "
        "(100), not 101; lower it or leave it out",
        "spec.roles.decode.engine.longPrefillTokenThreshold",
    ),
    (
        both(at("spec.engine.schedulingPolicy", "fcfs"), at("spec.qos.allowClientPriority", True)),
        "spec.qos.allowClientPriority: counts for no engine, since schedulingPolicy is "
        "fcfs; leave it out, or set engine.schedulingPolicy: priority",
        "spec.qos.allowClientPriority",
    ),
    (
        both(
            at("spec.roles.decode.engine", {"schedulingPolicy": "fcfs"}),
            at("spec.qos.estimation", LATE_GROUPS),
        ),
        "spec.qos.estimation.lateGroups: is for engines that let others go first; a stock engine "
        "and schedulingPolicy fcfs do not; leave it out, or set engine.type: pdcluster and "
        "schedulingPolicy: priority",
        "spec.qos.estimation.lateGroups",
    ),
    (
        both(vllm(), at("spec.qos.estimation", LATE_GROUPS)),
        "spec.qos.estimation.lateGroups: is for engines that let others go first; a stock engine "
        "and schedulingPolicy fcfs do not; leave it out",
        "spec.qos.estimation.lateGroups",
    ),
    (
        both(vllm(), at("spec.routing", {"branches": "Spread"})),
        "spec.routing.branches: Spread is for engines that give their KV to another decode worker; "
        "a stock engine does not; leave it out",
        "spec.routing.branches",
    ),
]
