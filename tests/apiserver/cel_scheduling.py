"""Cases of the rules about how an engine schedules, and for which requests."""

from typing import Any

from tests.schema.object_cases import Change, at, both, vllm

Case = tuple[Change, Change]
"""A change that a rule lets through, and one that it refuses."""

CHUNKS: dict[str, Any] = {"low": 32, "high": 256, "stages": 4, "maxTokens": 4096}
LATE_GROUPS = {"estimator": "rwt", "allowClientDeadline": True, "lateGroups": "Evict"}


def scheduling_cases(role: str, only: Change) -> list[Case]:
    """Those of one role.  only: makes an object that has it."""
    own = f"spec.roles.{role}"

    def case(right: dict[str, Any], wrong: dict[str, Any]) -> Case:
        return both(only, at("spec.engine", right)), both(only, at("spec.engine", wrong))

    return [
        case({"scheduler": "sarathi", "tbtSloMilliseconds": 50}, {"tbtSloMilliseconds": 50}),
        case({"scheduler": "sarathi", "chunkSchedule": CHUNKS}, {"chunkSchedule": CHUNKS}),
        case({"chunkedPrefill": False}, {"chunkedPrefill": False, "scheduler": "simple-chunking"}),
        case(
            {"longPrefillTokenThreshold": 8},
            {"longPrefillTokenThreshold": 8, "scheduler": "sarathi"},
        ),
        case({"scheduler": "orca", "maxModelLen": 256}, {"scheduler": "orca", "maxModelLen": 257}),
        case(
            {"longPrefillTokenThreshold": 8, "maxModelLen": 8},
            {"longPrefillTokenThreshold": 9, "maxModelLen": 8},
        ),
        case(
            {"scheduler": "sarathi", "chunkSchedule": CHUNKS},
            {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"high": 257}},
        ),
        (
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
        at("spec.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"low": 256}}),
        at("spec.engine", {"scheduler": "sarathi", "chunkSchedule": CHUNKS | {"low": 257}}),
    ),
    (
        both(
            at("spec.roles.decode.engine", {"schedulingPolicy": "fcfs"}),
            at("spec.qos.allowClientPriority", True),
        ),
        both(at("spec.engine.schedulingPolicy", "fcfs"), at("spec.qos.allowClientPriority", True)),
    ),
    (
        both(
            at("spec.service.apiKeySecret", "keys"),
            at("spec.qos.tenants", {"alice": {"priority": "low"}}),
        ),
        at("spec.qos.tenants", {"alice": {"priority": "low"}}),
    ),
    (
        at("spec.qos.estimation", {"estimator": "rwt", "rejectUnmeetable": True}),
        at("spec.qos.estimation", {"estimator": "ema", "rejectUnmeetable": True}),
    ),
    (
        at("spec.qos.estimation", LATE_GROUPS),
        at("spec.qos.estimation", {"allowClientDeadline": True, "lateGroups": "Evict"}),
    ),
    (
        both(
            at("spec.engine.schedulingPolicy", "preemptive"),
            at("spec.qos.estimation", LATE_GROUPS),
        ),
        both(at("spec.engine.schedulingPolicy", "fcfs"), at("spec.qos.estimation", LATE_GROUPS)),
    ),
    (
        at("spec.routing", {"branches": "Spread"}),
        both(vllm(), at("spec.routing", {"branches": "Spread"})),
    ),
]
