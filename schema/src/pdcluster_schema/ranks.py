"""The ranks of an engine and the accelerators of a worker: pure rules over one role."""

from collections.abc import Sequence

from pdcluster_schema.accelerators import NO_ACCELERATOR
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.ports import MAX_RANKS
from pdcluster_schema.sections import PoolSpec


def num_ranks(engine: EngineSpec) -> int:
    """Rank processes of one engine."""
    return engine.tensor_parallel_size * engine.pipeline_parallel_size


def gpus_per_replica(engine: EngineSpec, pool: PoolSpec) -> int:
    """Accelerators of one worker; 1 on a pool without any, whose workers count as one each."""
    if pool.gpu == NO_ACCELERATOR:
        return 1
    return pool.gpus_per_replica or num_ranks(engine)


def misfit(engine: EngineSpec, pools: Sequence[PoolSpec]) -> tuple[str, str, str] | None:
    """Misfit as (field below the role, reason, fix); None where all fits."""
    ranks = num_ranks(engine)
    sizes = (
        f"tensorParallelSize ({engine.tensor_parallel_size}) times pipelineParallelSize "
        f"({engine.pipeline_parallel_size})"
    )
    if ranks > MAX_RANKS:
        return (
            "engine.tensorParallelSize",
            f"{sizes} is {ranks} ranks, over the {MAX_RANKS} of one worker",
            "lower one of them",
        )
    for index, pool in enumerate(pools):
        field = f"pools[{index}].gpusPerReplica"
        if pool.gpus_per_replica is None:
            continue
        if pool.gpu == NO_ACCELERATOR:
            if pool.gpus_per_replica == 1:  # an older default, which stored objects still have
                continue
            return (
                field,
                "means nothing on a pool with gpu: cpu",
                "leave it out, or give the pool a gpu",
            )
        if pool.gpus_per_replica < ranks:
            reason = (
                f"must be at least {ranks}, not {pool.gpus_per_replica}: each rank has one "
                f"({sizes})"
            )
            return field, reason, "raise it, or leave it out"
    return None
