"""Rules of `engine.kvTiers` and `engine.kvCacheDtype` beside other fields of engine and role."""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine_rules import engine_rule, value_or_default
from pdcluster_schema.kv_tiers import host_bytes
from pdcluster_schema.quantities import number_of
from pdcluster_schema.section import Rule

# two lists of sections are of two types, which `or` does not take
_NONE = "!(role.?engine.?kvTiers.hasValue() || self.?engine.?kvTiers.hasValue())"


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


def kv_tiers_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of a host tier that the memory of its pods does not hold.

    The API server cannot add up quantities.
    """
    for role, declared in spec.roles.computing().items():
        engine = spec.engine_of(role)
        held = host_bytes(engine.kv_tiers)
        on_cpu = any(not engine.computes_on(pool.gpu) for pool in declared.pools)
        blocks = engine.kv_cache_memory if on_cpu and engine.num_blocks is None else 0
        for kind, amounts in _amounts(declared):
            if held and amounts is not None and number_of(amounts) <= held + blocks:
                more = f" and {blocks} of engine.kvCacheMemory" if blocks else ""
                return (
                    f"roles.{role}.resources.{kind}.memory",
                    f"must be more than the {held} bytes of engine.kvTiers{more}, not {amounts}",
                    "raise it, or lower the size of the host tier",
                )
    return None


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
