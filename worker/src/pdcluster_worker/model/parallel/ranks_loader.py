"""Opens a model over several ranks, and runs its steps from rank 0; only for our own decoder."""

import logging
import os
from typing import Any

import torch
from torch import Tensor

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder import Decoder, Forward
from pdcluster_worker.model.decoder_loader import open_decoder
from pdcluster_worker.model.kv_cache import DeviceKVCache, KVCache
from pdcluster_worker.model.kv_size import (
    block_num_bytes,
    blocks_that_fit,
    check_memory,
    stored_kv,
)
from pdcluster_worker.model.loading.loader import LoadedModel
from pdcluster_worker.model.memory import reserve_shared
from pdcluster_worker.model.parallel.device_parts import (
    RanksDeviceCache,
    blocks_on_devices,
    mapped,
    rank_cache,
)
from pdcluster_worker.model.parallel.group import RankGroup, rank_device
from pdcluster_worker.model.parallel.ranks import RankProcesses
from pdcluster_worker.model.rank_layout import PIPELINE_FIELD, TENSOR_FIELD, check_divides
from pdcluster_worker.model.step_plan import StepLimits, StepPlan, plan_parts
from pdcluster_worker.system.cgroups import memory_limit

logger = logging.getLogger(__name__)

# of rank 0's heads, or of all where rank 0 transfers all (`ParallelRank.moved_heads`)
RanksCache = KVCache | DeviceKVCache | RanksDeviceCache


class ParallelForward(Forward):
    """decoder: rank 0's part.  Pipeline stages work on micro-batches."""

    def __init__(self, decoder: Decoder, ranks: RankProcesses, group: RankGroup) -> None:
        self.operations = decoder.operations
        self.code = decoder.code
        self._decoder = decoder
        self._ranks = ranks
        self._group = group

    def logits(self, plan: StepPlan) -> Tensor:
        """Raises EngineBrokenError for any failure: other ranks have begun, so no retry."""
        parts = plan_parts(plan, self._ranks.place.pipeline_size)
        try:
            made = [self._part(part, slot) for slot, part in enumerate(parts)]
            logits = [self._arrived(rows, work) for rows, work in made]
            self._ranks.wait(len(parts))
        except Exception as e:
            raise self._ranks.explain(e) from e
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def warm_up(self, num_rows: int) -> None:
        self._ranks.warm_up(num_rows)
        self._decoder.warm_up(num_rows)
        self._ranks.wait()

    def close(self) -> None:
        self._ranks.close()
        self._group.close()

    def _part(self, plan: StepPlan, slot: int) -> tuple[Tensor, Any]:
        """Logits of a micro-batch, or the tensor and the pending receive."""
        self._ranks.step(plan, slot)
        if self._ranks.place.is_last:
            return self._decoder.logits(plan), None
        rows = self._decoder.empty_logits(len(plan.sample_at))
        work = self._group.expect_logits(rows) if len(rows) else None
        self._decoder.logits(plan)
        return rows, work

    def _arrived(self, rows: Tensor, work: Any) -> Tensor:
        if work is not None:
            self._group.wait(work)
        return rows


def open_ranks(
    loaded: LoadedModel,
    engine: EngineConfig,
    limits: StepLimits,
    ranks: RankProcesses,
    device: str = "cpu",
) -> tuple[RanksCache, ParallelForward]:
    """Raises ModelError if the model cannot be divided, is not our decoder's, or fails to load."""
    geometry = loaded.info.geometry
    if engine.batch_invariant and ranks.place.tensor_size > 1:
        raise ModelError(
            f"engine.batchInvariant is for {TENSOR_FIELD} 1, not {ranks.place.tensor_size}: sums "
            "over ranks round in another order; "
            "leave one of them out"
        )
    if loaded.checkpoint is None:
        raise ModelError(
            f"{loaded.reason}; such a model runs on one rank only: set {TENSOR_FIELD} and "
            f"{PIPELINE_FIELD} to 1"
        )
    check_divides(
        ranks.place,
        loaded.attention,
        loaded.checkpoint.architecture.divided,
        geometry.num_layers,
    )
    open_part = _on_cpus if device == "cpu" else _on_gpus
    cache, part = open_part(loaded, engine, limits, ranks)
    group = RankGroup(ranks.place, ranks.store, part.device)
    decoder = open_decoder(
        loaded.checkpoint,
        stored_kv(part, geometry),
        limits,
        invariant=engine.batch_invariant,
        rank=ranks.place,
        group=group,
    )
    handles = ranks.expect_done()
    if part.is_cuda and ranks.place.pipeline_size > 1:
        parts = [(ranks.place, part)]
        for place, handle in zip(ranks.place.others(), handles, strict=True):
            parts.append((place, mapped(handle, geometry, cache.num_blocks, place)))
        cache = RanksDeviceCache(geometry, cache.num_blocks, parts)
    logger.info(
        "reserved kv cache blocks=%d block_bytes=%d ranks=%d operations=%s",
        cache.num_blocks,
        block_num_bytes(geometry),
        ranks.place.num_ranks,
        decoder.operations.name,
    )
    return cache, ParallelForward(decoder, ranks, group)


def _on_cpus(
    loaded: LoadedModel, engine: EngineConfig, limits: StepLimits, ranks: RankProcesses
) -> tuple[RanksCache, Tensor]:
    """All ranks map one cache; returns rank 0's part too."""
    geometry = loaded.info.geometry
    num_blocks = blocks_that_fit(geometry, engine)
    num_bytes = num_blocks * block_num_bytes(geometry)
    check_memory(
        *(loaded.weight_bytes, num_bytes, engine, memory_limit()),
        adapter_bytes=loaded.adapter_bytes,
        expert_bytes=ranks.place.num_ranks * loaded.expert_bytes(engine.max_batched_tokens),
    )
    memory = reserve_shared("KV blocks", num_bytes)
    try:
        cache = KVCache(geometry, num_blocks, memory, ranks.place)
        ranks.open(num_blocks, memory, limits)
    finally:
        os.close(memory)
    return cache, cache.part(ranks.place)


def _on_gpus(
    loaded: LoadedModel, engine: EngineConfig, limits: StepLimits, ranks: RankProcesses
) -> tuple[RanksCache, Tensor]:
    """Each rank has its part of the cache on its own GPU.  Raises ModelError for too few GPUs."""
    info, place = loaded.info, ranks.place
    if (count := torch.cuda.device_count()) < place.num_ranks:
        raise ModelError(
            f"{place.num_ranks} ranks need an accelerator each, and this worker sees {count}: "
            "raise the pool's gpusPerReplica"
        )
    num_blocks = blocks_on_devices(
        info.geometry, engine, place, info.vocab_size, loaded.weight_bytes
    )
    cache = rank_cache(info.geometry, num_blocks, place, rank_device("cuda", place.rank))
    ranks.open(num_blocks, None, limits)
    return cache, cache.tensor
