"""Rules of one role's engine: its scheduling, its ranks and its type."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pydantic.alias_generators import to_snake

from pdcluster_schema.accelerators import NO_ACCELERATOR, gpus_per_node
from pdcluster_schema.engine import ACCELERATOR_TOKENS, EngineSpec
from pdcluster_schema.ports import MAX_ENGINES, MAX_PODS, WHOLE_PROMPT_SCHEDULERS
from pdcluster_schema.section import Rule
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.stock_engine import PDCLUSTER_ONLY, STOCK, STOCK_ONLY, VLLM


def num_ranks(engine: EngineSpec) -> int:
    """Rank processes of one worker with an accelerator each; engines of ours share theirs."""
    engines = engine.data_parallel_size if engine.is_stock else 1
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engines


def pods_per_replica(engine: EngineSpec, pool: PoolSpec) -> int:
    """Pods of one worker: as given, else so many that `gpusPerPod` holds its ranks."""
    if pool.pods_per_replica is not None or pool.gpus_per_pod is None:
        return pool.pods_per_replica or 1
    return -(-num_ranks(engine) // pool.gpus_per_pod)


def gpus_per_replica(engine: EngineSpec, pool: PoolSpec) -> int:
    """Accelerators of one worker; 1 on a pool without any, whose workers count as one each."""
    if pool.gpu == NO_ACCELERATOR:
        return 1
    return pool.gpus_per_replica or _least_gpus(engine, pods_per_replica(engine, pool))


def _least_gpus(engine: EngineSpec, pods: int) -> int:
    """One for each rank, which a stock engine's pods share, and each pod of ours has."""
    return num_ranks(engine) if engine.is_stock else num_ranks(engine) * pods


def misfit(engine: EngineSpec, pools: Sequence[PoolSpec]) -> tuple[str, str, str] | None:
    """Misfit as (field below the role, reason, fix); None where all fits."""
    sizes = (
        f"tensorParallelSize ({engine.tensor_parallel_size}) times pipelineParallelSize "
        f"({engine.pipeline_parallel_size})"
    )
    if engine.is_stock and engine.data_parallel_size > 1:
        sizes += f" times dataParallelSize ({engine.data_parallel_size})"
    for index, pool in enumerate(pools):
        found = _rank_misfit(engine, pool, sizes) or _gpu_misfit(engine, pool, sizes)
        if found is not None:
            field, reason, fix = found
            return field.replace("POOL", f"pools[{index}]"), reason, fix
    return None


def _rank_misfit(engine: EngineSpec, pool: PoolSpec, sizes: str) -> tuple[str, str, str] | None:
    """sizes: of the ranks, as text."""
    ranks, data = num_ranks(engine), engine.data_parallel_size
    pods, most = pods_per_replica(engine, pool), pool.gpus_per_pod or gpus_per_node(pool.gpu)
    divided = pods if engine.is_stock else 1
    if ranks > most * divided:
        each = f"over the {most} of one pod" if divided == 1 else f"over {most} in {pods} pods"
        more = ", or give pools more podsPerReplica" if engine.is_stock else ""
        return (
            "engine.tensorParallelSize",
            f"{sizes} is {ranks} ranks, {each}",
            f"lower one of them{more}",
        )
    if pods > MAX_PODS:
        return (
            "POOL.gpusPerPod",
            f"is {most}, so the {ranks} ranks of a worker ({sizes}) need {pods} pods, more than "
            f"{MAX_PODS}",
            "raise it, or lower the ranks",
        )
    if ranks % divided:
        return (
            "POOL.podsPerReplica",
            f"{pods} pods do not divide the {ranks} ranks of a worker ({sizes})",
            "give a number that does, or change the ranks",
        )
    if not engine.is_stock and pods > 1 and data != pods:
        return (
            "POOL.podsPerReplica",
            f"is {pods}, and dataParallelSize {data}: each pod of a worker has one of its engines",
            f"set engine.dataParallelSize: {pods}, or leave podsPerReplica out",
        )
    if not engine.is_stock and data > MAX_ENGINES:
        return (
            "engine.dataParallelSize",
            f"must be at most {MAX_ENGINES}, not {data}, but for type vllm",
            "lower it, and give the pool more replicas",
        )
    if engine.is_stock and data % pods and pods % data:
        return (
            "POOL.podsPerReplica",
            f"is {pods}, and dataParallelSize {data}: a pod of vLLM's has whole data-parallel "
            "ranks, or a rank has whole pods",
            "make one a multiple of the other",
        )
    return None


def _gpu_misfit(engine: EngineSpec, pool: PoolSpec, sizes: str) -> tuple[str, str, str] | None:
    pods, most = pods_per_replica(engine, pool), pool.gpus_per_pod or gpus_per_node(pool.gpu)
    field, least = "POOL.gpusPerReplica", _least_gpus(engine, pods)
    if pool.gpus_per_replica is None:
        return None
    if pool.gpu == NO_ACCELERATOR:
        if pool.gpus_per_replica == 1:  # an older default, which stored objects still have
            return None
        return (
            field,
            "means nothing on a pool with gpu: cpu",
            "leave it out, or give the pool a gpu",
        )
    if pool.gpus_per_replica < least or pool.gpus_per_replica % pods:
        of_pods = "" if pods == 1 else f" and a multiple of the {pods} pods"
        reason = (
            f"must be at least {least}{of_pods}, not {pool.gpus_per_replica}: each rank has "
            f"one ({sizes})"
        )
        return field, reason, "raise it, or leave it out"
    if pool.gpus_per_replica > most * pods:
        return (
            field,
            f"must be at most {most * pods}, {most} in each pod, not {pool.gpus_per_replica}",
            "lower it, or raise podsPerReplica or gpusPerPod",
        )
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
    if kind not in STOCK:
        for field in STOCK_ONLY:
            if field in flag_text:
                yield EngineFault(
                    field, f"is for a stock engine, not {kind}", "leave it out, or set type: vllm"
                )
        return
    for field in PDCLUSTER_ONLY:
        if field in flag_text:
            fix = f"leave it out, or give {STOCK[kind]}'s own flag in engine.args"
            if (kind, field) == (VLLM, "kvTiers"):
                fix = "set engine.kvTransfer.offload in its place"
            yield EngineFault(field, f"is not for {kind}, which has no such setting", fix)


_DEFAULTS = {str(field.alias): field.default for field in EngineSpec.model_fields.values()}


def given(field: str, of: str = "role") -> str:
    """CEL of a field of the engine, of the role or else of the spec."""
    return f"{of}.?engine.?{field}.or(self.?engine.?{field})"


def value_or_default(field: str, of: str = "role") -> str:
    """CEL of the same with its default."""
    default = _DEFAULTS[field]
    text = f"'{default}'" if isinstance(default, str) else str(default).lower()
    return f"{given(field, of)}.orValue({text})"


def _size(field: str, role: str, on_accelerator: int) -> str:
    """A size that has another default on an accelerator."""
    is_cpu = f"{value_or_default('device')} == 'cpu'"
    on_cpu = f"{is_cpu} || self.roles.{role}.pools.exists(p, p.gpu == 'cpu')"
    return f"{given(field)}.orValue({on_cpu} ? {_DEFAULTS[field]} : {on_accelerator})"


def engine_rule(
    role: str,
    field: str,
    cel: str,
    holds: Callable[[Any, set[str]], bool],
    text: tuple[str, str],
    *,
    found: Callable[[Any], object] | None = None,
) -> Rule:
    """A rule of a role's engine.

    cel:   of `role`.
    holds: of the engine and the types of accelerator of its pools.
    text:  reason and fix.  found: of the engine.
    """

    def gpus(spec: Any) -> set[str]:
        declared = spec.roles.computing().get(role)
        return set() if declared is None else {pool.gpu for pool in declared.pools}

    def engine(spec: Any) -> EngineSpec:
        sized: EngineSpec = spec.engine_of(role).sized_for(*gpus(spec))
        return sized

    def holds_in(spec: Any) -> bool:
        return not gpus(spec) or holds(engine(spec), gpus(spec))

    return Rule(
        cel=f"[?self.roles.?{role}].all(role, {cel})",
        holds=holds_in,
        reason=text[0],
        fix=text[1],
        at=f"roles.{role}.engine.{field}",
        found=None if found is None else lambda spec: found(engine(spec)),
        values=engine,
    )


def engine_rules(role: str) -> Iterator[Rule]:
    """Fields of an engine that do not fit together, or not with the pools.

    The worker checks sizes once more when it has loaded the model: only then the length of its
    context is known.
    """
    yield from _scheduler_rules(role)
    yield from _size_rules(role)
    yield from _device_rules(role)


def _scheduler_rules(role: str) -> Iterator[Rule]:
    scheduler, is_chunked = value_or_default("scheduler"), value_or_default("chunkedPrefill")
    threshold, high = value_or_default("longPrefillTokenThreshold"), given("chunkSchedule.?high")
    for field, attribute, found in (
        ("tbtSloMilliseconds", "tbt_slo_milliseconds", given("tbtSloMilliseconds")),
        ("chunkSchedule", "chunk_schedule", high),
    ):
        yield engine_rule(
            role,
            field,
            f"!{found}.hasValue() || {scheduler} == 'sarathi'",
            partial(_is_of_sarathi, attribute),
            ("is for scheduler: sarathi", "leave it out, or set scheduler: sarathi"),
            found=lambda engine: engine.scheduler,
        )
    yield engine_rule(
        role,
        "chunkedPrefill",
        f"{is_chunked} || {scheduler} == 'continuous'",
        lambda engine, _: engine.chunked_prefill or engine.scheduler == "continuous",
        ("false is for scheduler: continuous", "leave it out"),
        found=lambda engine: engine.scheduler,
    )
    yield engine_rule(
        role,
        "longPrefillTokenThreshold",
        f"{threshold} == 0 || {scheduler} == 'continuous' && {is_chunked}",
        lambda engine, _: (
            not engine.long_prefill_token_threshold
            or (engine.scheduler == "continuous" and engine.chunked_prefill)
        ),
        ("caps the chunks of scheduler: continuous, and no prompt is cut so here", "leave it out"),
    )


def _size_rules(role: str) -> Iterator[Rule]:
    tokens = _size("maxBatchedTokens", role, ACCELERATOR_TOKENS)
    # requests fit by default into a step of any size on an accelerator
    sequences = _size("maxSequences", role, 1)
    scheduler, is_chunked = value_or_default("scheduler"), value_or_default("chunkedPrefill")
    whole = ", ".join(f"'{name}'" for name in WHOLE_PROMPT_SCHEDULERS)
    threshold, high = value_or_default("longPrefillTokenThreshold"), given("chunkSchedule.?high")
    yield engine_rule(
        role,
        "maxBatchedTokens",
        f"{tokens} >= {sequences} || self.?engine.?type.orValue('pdcluster') != 'pdcluster'",
        # a stock engine schedules as it will
        lambda engine, _: engine.is_stock or engine.max_batched_tokens >= engine.max_sequences,
        (
            "must be at least {maxSequences}, since a step computes a token of each sequence",
            "raise maxBatchedTokens or lower maxSequences",
        ),
    )
    yield engine_rule(
        role,
        "maxBatchedTokens",
        f"!({scheduler} in [{whole}]) && {is_chunked} || "
        f"{tokens} >= {given('maxModelLen')}.orValue(1)",
        lambda engine, _: (
            (engine.chunked_prefill and engine.scheduler not in WHOLE_PROMPT_SCHEDULERS)
            or engine.max_batched_tokens >= (engine.max_model_len or 1)
        ),
        (
            "must be at least {maxModelLen}, since a step computes a whole prompt",
            "raise maxBatchedTokens or lower maxModelLen",
        ),
    )
    yield engine_rule(
        role,
        "longPrefillTokenThreshold",
        f"[{threshold}].all(tokens, tokens == 0 || "
        f"tokens <= {given('maxModelLen')}.orValue(tokens))",
        lambda engine, _: (
            engine.max_model_len is None
            or engine.long_prefill_token_threshold <= engine.max_model_len
        ),
        ("must be at most {maxModelLen}", "lower it or leave it out"),
    )
    yield engine_rule(
        role,
        "chunkSchedule.high",
        f"{high}.optMap(tokens, tokens <= {tokens}).orValue(true)",
        lambda engine, _: (
            engine.chunk_schedule is None or engine.chunk_schedule.high <= engine.max_batched_tokens
        ),
        ("must be at most {maxBatchedTokens}", "lower high or raise maxBatchedTokens"),
    )


def _is_of_sarathi(attribute: str, engine: EngineSpec, gpus: set[str]) -> bool:
    return getattr(engine, attribute) is None or engine.scheduler == "sarathi"


def _device_rules(role: str) -> Iterator[Rule]:
    device, pools = value_or_default("device"), f"self.roles.{role}.pools"
    yield engine_rule(
        role,
        "numBlocks",
        f"{given('numBlocks')}.optMap(blocks, blocks >= {value_or_default('dataParallelSize')})"
        ".orValue(true)",
        lambda engine, _: (
            engine.num_blocks is None or engine.num_blocks >= engine.data_parallel_size
        ),
        (
            "must be at least {dataParallelSize}, whose engines share them",
            "raise numBlocks or lower dataParallelSize",
        ),
    )
    yield engine_rule(
        role,
        "batchInvariant",
        f"!{value_or_default('batchInvariant')} || {device} == 'cpu' || "
        f"{pools}.all(p, p.gpu == 'cpu')",
        lambda engine, gpus: (
            not engine.batch_invariant or engine.device == "cpu" or gpus == {NO_ACCELERATOR}
        ),
        (
            "is for CPUs so far, and gpu of a pool is not cpu",
            "leave it out, or set engine.device: cpu",
        ),
    )
    cuda = engine_rule(
        role,
        "device",
        f"{device} != 'cuda' || {pools}.all(p, p.gpu != 'cpu')",
        lambda engine, gpus: engine.device != "cuda" or NO_ACCELERATOR not in gpus,
        (
            "is cuda, which needs an accelerator as gpu of each pool",
            "give the pool another gpu, or leave engine.device out",
        ),
    )

    def pool_without(spec: Any) -> str:
        gpus = [pool.gpu for pool in spec.roles.computing()[role].pools]
        return f"{NO_ACCELERATOR} in pools[{gpus.index(NO_ACCELERATOR)}]"

    yield replace(cuda, found=pool_without)


def startup_rule(role: str) -> Rule:
    seconds = "startupTimeoutSeconds"
    return Rule(
        cel=f"[?self.roles.?{role}].all(role, !has(role.{seconds}) || role.{seconds} <= "
        "self.?rollout.?progressDeadlineSeconds.orValue(3600))",
        holds=lambda spec: (
            (getattr(spec.roles.present().get(role), to_snake(seconds), None) or 0)
            <= spec.rollout.progress_deadline_seconds
        ),
        reason="must be at most rollout.{progressDeadlineSeconds}, when a roll out is given up",
        fix="raise rollout.progressDeadlineSeconds too",
        at=f"roles.{role}.{seconds}",
        values=lambda spec: spec.rollout,
    )
