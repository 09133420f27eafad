"""Rules of `engine.type: sglang`: what SGLang does not do behind PDCluster's port, each by name."""

from collections.abc import Iterator
from typing import Any

from pdcluster_schema.engine_rules import pods_per_replica
from pdcluster_schema.section import Rule
from pdcluster_schema.stock_engine import SGLANG


def sglang_rules() -> Iterator[Rule]:
    yield Rule(
        cel=f"self.?engine.?type.orValue('pdcluster') != '{SGLANG}' || has(self.roles.mixed)",
        holds=lambda spec: spec.engine.type != SGLANG or spec.roles.mixed is not None,
        reason="is sglang, which is for mixed workers: its decode side has to be called before a "
        "prefill begins, and here it is called with what the prefill answered",
        fix="give roles.mixed in place of prefill and decode, or set type: vllm",
        at="engine.type",
    )


def sglang_fault(spec: Any) -> tuple[str, str, str] | None:
    """(place, reason, fix) of what would cost the API server too much to check."""
    if spec.engine.type != SGLANG or spec.roles.mixed is None:
        return None
    engine = spec.engine_of("mixed")
    block, tokens = engine.block_size, engine.max_batched_tokens
    has_tokens = "max_batched_tokens" in engine.model_fields_set
    for field, is_wrong, reason, fix in (
        (
            "kvTransfer",
            engine.kv_transfer is not None,
            "is not for sglang, whose workers move no KV",
            "leave it out",
        ),
        (
            "kvCacheMemory",
            "kv_cache_memory" in engine.model_fields_set,
            "is not for sglang, which has no such bound",
            "set numBlocks or deviceMemoryShare",
        ),
        (
            "dataParallelSize",
            engine.data_parallel_size > 1,
            "must be 1 with sglang, which has one engine a worker",
            "give the pool more replicas",
        ),
        (
            "maxBatchedTokens",
            has_tokens and tokens % block > 0,
            f"is {tokens}, which blockSize ({block}) does not divide, and SGLang ends with that",
            f"give a multiple of {block}",
        ),
        (
            "blockSize",
            not has_tokens and block & (block - 1) > 0,
            f"is {block}, which does not divide SGLang's own maxBatchedTokens, a power of two",
            f"give a power of two, or maxBatchedTokens that is a multiple of {block}",
        ),
    ):
        if is_wrong:
            return f"roles.mixed.engine.{field}", reason, fix
    for index, pool in enumerate(spec.roles.mixed.pools):
        if (pods := pods_per_replica(engine, pool)) > 1:
            return (
                f"roles.mixed.pools[{index}].podsPerReplica",
                f"is {pods}, and sglang serves from one pod a worker",
                "give a node with more accelerators, or set engine.type: vllm",
            )
    return None
