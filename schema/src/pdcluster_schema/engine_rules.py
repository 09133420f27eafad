"""Rules of one role's engine: its scheduling, its ranks and its type."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pdcluster_schema.accelerators import NO_ACCELERATOR, Precision
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.ports import MAX_RANKS, WHOLE_PROMPT_SCHEDULERS
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.vllm_engine import PDCLUSTER_ONLY, VLLM, VLLM_ONLY


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


class EngineFault(NamedTuple):
    """field: below `engine`."""

    field: str
    reason: str
    fix: str


def engine_faults(kind: str, engine: EngineSpec) -> Iterator[EngineFault]:
    """Fields of one section `engine` that are not for an engine of a type."""
    flag_text = {
        str(type(engine).model_fields[name].alias)
        for name in engine.model_fields_set
        if getattr(engine, name) is not None
    }
    if kind != VLLM:
        for field in VLLM_ONLY:
            if field in flag_text:
                yield EngineFault(
                    field, f"is for a stock engine, not {kind}", "leave it out, or set type: vllm"
                )
        return
    for field in PDCLUSTER_ONLY:
        if field not in flag_text:
            continue
        if field == "dataParallelSize":
            fix = "leave it out, and give the pool more replicas"
            yield EngineFault(field, "is not for vllm, of which a worker has one engine", fix)
        else:
            fix = "leave it out, or give vLLM's own flag in engine.args"
            yield EngineFault(field, "is not for vllm, which has no such setting", fix)


def scheduling_fault(engine: EngineSpec) -> EngineFault | None:
    """The first fault of one role's engine; a stock engine schedules as it will."""
    if engine.type != "pdcluster":
        return None
    return (
        _budget_too_small(engine)
        or _of_another_scheduler(engine)
        or _wrong_size(engine)
        or _too_few_blocks(engine)
    )


def _budget_too_small(engine: EngineSpec) -> EngineFault | None:
    if engine.max_batched_tokens >= engine.max_sequences:
        return None
    reason = (
        f"must be at least maxSequences ({engine.max_sequences}), since a step computes a token "
        "of each sequence"
    )
    fix = "raise maxBatchedTokens or lower maxSequences"
    return EngineFault("maxBatchedTokens", reason, fix)


def _too_few_blocks(engine: EngineSpec) -> EngineFault | None:
    if engine.num_blocks is None or engine.num_blocks >= engine.data_parallel_size:
        return None
    reason = (
        f"must be at least dataParallelSize ({engine.data_parallel_size}), whose engines share "
        f"them, not {engine.num_blocks}"
    )
    return EngineFault("numBlocks", reason, "raise numBlocks or lower dataParallelSize")


def _of_another_scheduler(engine: EngineSpec) -> EngineFault | None:
    own = engine.scheduler
    for field, given in (
        ("tbtSloMilliseconds", engine.tbt_slo_milliseconds),
        ("chunkSchedule", engine.chunk_schedule),
    ):
        if given is not None and own != "sarathi":
            reason = f"is for scheduler sarathi, not {own}"
            return EngineFault(field, reason, "leave it out, or set scheduler: sarathi")
    if not engine.chunked_prefill and own != "continuous":
        reason = f"false is for scheduler continuous, not {own}"
        return EngineFault("chunkedPrefill", reason, "leave it out")
    if engine.long_prefill_token_threshold and (own != "continuous" or not engine.chunked_prefill):
        reason = "caps the chunks of scheduler continuous, and no prompt is cut so here"
        return EngineFault("longPrefillTokenThreshold", reason, "leave it out")
    return None


def _wrong_size(engine: EngineSpec) -> EngineFault | None:
    budget, length = engine.max_batched_tokens, engine.max_model_len
    is_whole = not engine.chunked_prefill or engine.scheduler in WHOLE_PROMPT_SCHEDULERS
    if is_whole and length is not None and budget < length:
        reason = f"must be at least maxModelLen ({length}), since a step computes a whole prompt"
        return EngineFault(
            "maxBatchedTokens", reason, "raise maxBatchedTokens or lower maxModelLen"
        )
    if length is not None and engine.long_prefill_token_threshold > length:
        reason = f"must be at most maxModelLen ({length})"
        return EngineFault("longPrefillTokenThreshold", reason, "lower it or leave it out")
    if engine.chunk_schedule is not None and engine.chunk_schedule.high > budget:
        reason = f"must be at most maxBatchedTokens ({budget})"
        return EngineFault("chunkSchedule.high", reason, "lower high or raise maxBatchedTokens")
    return None


_PRECISION_OF: Final[dict[str, Precision]] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "ptpc_fp8": "fp8",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "fp8_per_channel": "fp8",
    "mxfp8": "fp8",
    "deepseek_v4_fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_mxfp8": "fp8",
    "modelopt_fp4": "fp4",
    "nvfp4_per_token": "fp4",
}
"""Values of vLLM's --quantization with which it computes in another precision than BF16; the others
quantize weights alone, or leave it to the checkpoint.
"""


def precision_of(engine: EngineSpec) -> Precision:
    """Precision in which an engine computes prompts, as far as its fields say it.

    Our own engine has no other than BF16 (and float32); vLLM has what --quantization says.
    """
    if engine.type != VLLM:
        return "bf16"
    method, is_next = "", False
    for argument in engine.args or ():
        name, has_value, value = argument.strip().partition("=")
        if is_next:
            method, is_next = argument.strip(), False
        elif name in ("-q", "--quantization"):
            method, is_next = value, not has_value
    return _PRECISION_OF.get(method, "bf16")
