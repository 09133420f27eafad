"""Cases of the rules about how an engine schedules, and for which requests: (field, message, right,
wrong).
"""

from typing import Any

from tests.schema.object_cases import Change, at, both

Case = tuple[str, str, Change, Change]

CHUNKS: dict[str, Any] = {"low": 32, "high": 256, "stages": 4, "maxTokens": 4096}
LOW = "low must be at most high: lower low or raise high"


def scheduling_cases(role: str, only: Change) -> list[Case]:
    """Those of one role.  only: makes an object that has it."""
    own = f"spec.roles.{role}"

    def case(field: str, text: str, right: dict[str, Any], wrong: dict[str, Any]) -> Case:
        return (
            f"{own}.engine.{field}",
            f"roles.{role}.engine.{field} {text}",
            both(only, at("spec.engine", right)),
            both(only, at("spec.engine", wrong)),
        )

    return [
        case(
            "tbtSloMilliseconds",
            "is for scheduler: sarathi: leave it out, or set scheduler: sarathi",
            {"scheduler": "sarathi", "tbtSloMilliseconds": 50},
            {"tbtSloMilliseconds": 50},
        ),
        case(
            "chunkSchedule",
            "is for scheduler: sarathi: leave it out, or set scheduler: sarathi",
            {"scheduler": "sarathi", "chunkSchedule": CHUNKS},
            {"chunkSchedule": CHUNKS},
        ),
        case(
            "chunkedPrefill",
            "false is for scheduler: continuous: leave it out",
            {"chunkedPrefill": False},
            {"chunkedPrefill": False, "scheduler": "simple-chunking"},
        ),
        case(
            "longPrefillTokenThreshold",
            "caps the chunks of scheduler: continuous, and no prompt is cut so here: leave it out",
            {"longPrefillTokenThreshold": 8},
            {"longPrefillTokenThreshold": 8, "scheduler": "sarathi"},
        ),
        case(
            "maxBatchedTokens",
            "must be at least maxModelLen, since a step computes a whole prompt: raise "
            "maxBatchedTokens or lower maxModelLen",
            {"scheduler": "orca", "maxModelLen": 256},
            {"scheduler": "orca", "maxModelLen": 257},
        ),
        case(
            "longPrefillTokenThreshold",
            "must be at most maxModelLen: lower it or leave it out",
            {"longPrefillTokenThreshold": 8, "maxModelLen": 8},
            {"longPrefillTokenThreshold": 9, "maxModelLen": 8},
        ),
        case(
            "chunkSchedule.high",
            "must be at most maxBatchedTokens: lower high or raise maxBatchedTokens",
            {"scheduler": "sarathi", "chunkSchedule": CHUNKS},
            {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"high": 257}},
        ),
        (
            f"{own}.engine.chunkSchedule.low",
            LOW,
            both(only, at(f"{own}.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS})),
            both(
                only,
                at(
                    f"{own}.engine",
                    {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"low": 257}},
                ),
            ),
        ),
    ]


OBJECT_CASES: list[Case] = [
    (
        "spec.engine.chunkSchedule.low",
        LOW,
        at("spec.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"low": 256}}),
        at("spec.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"low": 257}}),
    ),
    (
        "spec.qos.allowClientPriority",
        "qos.allowClientPriority counts for no engine, since schedulingPolicy is fcfs: leave it "
        "out, or set engine.schedulingPolicy: priority",
        both(
            at("spec.roles.decode.engine", {"schedulingPolicy": "fcfs"}),
            at("spec.qos.allowClientPriority", True),
        ),
        both(at("spec.engine.schedulingPolicy", "fcfs"), at("spec.qos.allowClientPriority", True)),
    ),
    (
        "spec.qos.tenants",
        "qos.tenants is for API keys, and no key is asked for: give service.apiKeySecret, or leave "
        "qos.tenants out",
        both(
            at("spec.service.apiKeySecret", "keys"),
            at("spec.qos.tenants", {"alice": {"priority": "low"}}),
        ),
        at("spec.qos.tenants", {"alice": {"priority": "low"}}),
    ),
    (
        "spec.qos.estimation.rejectUnmeetable",
        "rejectUnmeetable needs an estimate of the completion, and estimator ema has none: set "
        "estimator to rwt or loadAware, or leave it out",
        at("spec.qos.estimation", {"estimator": "rwt", "rejectUnmeetable": True}),
        at("spec.qos.estimation", {"estimator": "ema", "rejectUnmeetable": True}),
    ),
]
