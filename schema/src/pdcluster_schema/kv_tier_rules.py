"""Rules of `engine.kvTiers` and `engine.kvCacheDtype` beside other fields of engine and role."""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine_rules import engine_rule, value_or_default
from pdcluster_schema.kv_tiers import host_bytes
from pdcluster_schema.quantities import number_of
from pdcluster_schema.section import Rule

_SIZE = "?engine.?kvTiers.optMap(tiers, size(tiers))"
_NONE = f"role.{_SIZE}.or(self.{_SIZE}).orValue(0) == 0"


def kv_tier_rules(role: str) -> Iterator[Rule]:
    yield engine_rule(
        role,
        "kvTiers",
        f"{_NONE} || {value_or_default('prefixCaching')}",
        lambda engine, _: not engine.kv_tiers or engine.prefix_caching,
        ("holds cached prefixes, and prefixCaching is false", "leave one of them out"),
    )
    ranks = " * ".join(
        value_or_default(size) for size in ("tensorParallelSize", "pipelineParallelSize")
    )
    yield engine_rule(
        role,
        "kvTiers",
        f"{_NONE} || {ranks} == 1 || "
        f"{value_or_default('device')} == 'cpu' || "
        f"self.roles.{role}.pools.all(p, p.gpu == '{NO_ACCELERATOR}')",
        lambda engine, gpus: not engine.kv_tiers or not _splits_device(engine, gpus),
        (
            "needs one rank on accelerators, each of which holds a part of every block",
            "leave it out, or set tensorParallelSize and pipelineParallelSize to 1",
        ),
    )


def memory_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of a host tier, or adapters, that the memory of a role's pods does not
    hold.

    The API server cannot add up quantities.
    """
    for role, declared in spec.roles.computing().items():
        engine, adapters = spec.engine_of(role), spec.model.runtime_adapters
        devices = {engine.computes_on(pool.gpu) for pool in declared.pools}
        held = dict([_host_tier(engine, is_pinned=True in devices)])
        if False in devices:
            held["model.runtimeAdapters.memory"] = 0 if adapters is None else adapters.memory
        if not any(held.values()):
            continue
        if False in devices and engine.num_blocks is None:
            held["engine.kvCacheMemory"] = engine.kv_cache_memory
        for kind, amounts in _amounts(declared):
            if amounts is not None and number_of(amounts) <= sum(held.values()):
                parts = [f"the {size} bytes of {name}" for name, size in held.items() if size]
                return (
                    f"roles.{role}.resources.{kind}.memory",
                    f"must be more than {' and '.join(parts)}, not {amounts}",
                    "raise it, or lower one of those",
                )
    return None


def _host_tier(engine: Any, *, is_pinned: bool) -> tuple[str, int]:
    """Name and bytes of the host tier."""
    held, engines = host_bytes(engine.kv_tiers), engine.data_parallel_size
    if not held or not is_pinned:
        return "engine.kvTiers", held
    # torch rounds pinned memory up to a power of two
    return "engine.kvTiers, pinned", engines << (max(1, held // engines) - 1).bit_length()


def kv_dtype_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of a pool whose GPUs lack the dtype.

    The API server does not know what GPUs compute.
    """
    for role, declared in spec.roles.computing().items():
        engine = spec.engine_of(role)
        for index, pool in enumerate(declared.pools):
            has_units = spec.hardware(pool.gpu).computes_in("fp8")
            if (
                engine.kv_cache_dtype == "fp8_e4m3"
                and engine.computes_on(pool.gpu)
                and not has_units
            ):
                return (
                    f"roles.{role}.pools[{index}].gpu",
                    f"is {pool.gpu}, without FP8, and engine.kvCacheDtype is fp8_e4m3",
                    "set engine.kvCacheDtype: int8 for all roles, or take a GPU with FP8",
                )
    return None


def _amounts(role: Any) -> Iterator[tuple[str, Any]]:
    for kind in ("requests", "limits"):
        yield kind, getattr(role.resources, kind).get("memory")


def _splits_device(engine: Any, gpus: set[str]) -> bool:
    """Return whether ranks of an engine have parts of a block on accelerators of their own."""
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    return ranks > 1 and engine.device != "cpu" and gpus != {NO_ACCELERATOR}
