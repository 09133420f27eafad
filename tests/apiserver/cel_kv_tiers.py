"""Cases of the rules of engine.kvTiers."""

from typing import Any

from tests.schema.object_cases import Change, at, both

Case = tuple[Change, Change]
"""A change that a rule lets through, and one that it refuses."""

HOST: dict[str, Any] = {"type": "host", "size": "1Gi"}
DISK: dict[str, Any] = {"type": "disk", "size": "2Gi", "path": "/kv"}
SERVER: dict[str, Any] = {"type": "shared", "url": "rediss://kv.cache:6379/1"}
SECRET = {"passwordSecret": "kv"}
SHARED: dict[str, Any] = {"type": "shared", "size": "2Gi", "path": "/mnt/kv"}


def list_cases(place: str, base: Change) -> list[Case]:
    """Those of the list.  place: of an engine.  base: makes an object that has it."""

    def case(right: list[dict[str, Any]], wrong: list[dict[str, Any]]) -> Case:
        field = f"{place}.kvTiers"
        return both(base, at(field, right)), both(base, at(field, wrong))

    return [
        case([HOST, DISK], [DISK, HOST]),
        case([DISK], [{"type": "disk", "size": "2Gi"}]),
        case([DISK], [{**DISK, "path": "kv"}]),
        case([{**DISK, "path": "/tmp/.kv-1/a_b..c"}], [{**DISK, "path": "/kv/.."}]),
        case([{**DISK, "path": "/model/kv"}], [{**DISK, "path": "/models/kv"}]),
        case([{**DISK, "path": "/opt/kv"}], [{**DISK, "path": "/opt"}]),
        case([HOST], [{**HOST, "size": "0"}]),
        case([HOST], [{**HOST, "path": "/kv"}]),
        case([HOST, SHARED], [SHARED]),
        case([HOST, DISK, SHARED], [HOST, SHARED, DISK]),
        case([HOST, DISK, SHARED], [HOST, DISK, {**SHARED, "path": "/kv"}]),
        case([HOST, SHARED], [HOST, {"type": "shared", "size": "2Gi"}]),
        case([HOST, SERVER], [HOST, {**SERVER, "url": "redis://me:secret@kv"}]),
        case(
            [HOST, SERVER | {"url": "redis://kv:65535"}],
            [HOST, SERVER | {"url": "redis://kv:65536"}],
        ),
        case([HOST, SERVER], [HOST, {**SERVER, "size": "2Gi"}]),
        case([HOST, SERVER], [HOST, {**SERVER, "path": "/mnt/kv"}]),
        case([HOST, SERVER | SECRET], [HOST, SHARED | SECRET]),
        case([HOST, SERVER | SECRET], [HOST, SERVER | {"passwordSecret": "My_Secret"}]),
        case([HOST], [{"type": "host"}]),
    ]


def role_cases(role: str, only: Change) -> list[Case]:
    """Those beside other fields of one role.  only: makes an object that has it."""
    own = f"spec.roles.{role}"
    on_gpu = both(only, at(f"{own}.pools.0.gpu", "H100"))

    def case(base: Change, right: dict[str, Any], wrong: dict[str, Any]) -> Case:
        field, tiers = f"{own}.engine", {"kvTiers": [HOST]}
        return both(base, at(field, tiers | right)), both(base, at(field, tiers | wrong))

    tiered = both(only, at("spec.engine", {"kvTiers": [HOST], "prefixCaching": True}))
    return [
        case(tiered, {"kvTiers": [], "prefixCaching": False}, {"prefixCaching": False}),
        case(only, {"prefixCaching": True}, {"prefixCaching": False}),
        case(on_gpu, {}, {"pipelineParallelSize": 2}),
    ]
