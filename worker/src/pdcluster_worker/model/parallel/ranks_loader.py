"""Opens a model over several ranks; only our own decoder can be divided."""

import logging
import os

import torch
from torch import Tensor

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.decoder_weights import pack_decoder
from pdcluster_worker.model.device_cache import DeviceKVCache, check_memory
from pdcluster_worker.model.kv_cache import KVCache, block_num_bytes, blocks_that_fit
from pdcluster_worker.model.loading.loader import LoadedModel
from pdcluster_worker.model.ops.choose import make_operations
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.parallel.device_parts import (
    RanksDeviceCache,
    blocks_on_devices,
    mapped,
    open_part,
    rank_cache,
)
from pdcluster_worker.model.parallel.forward import ParallelForward
from pdcluster_worker.model.parallel.group import RankGroup, rank_device
from pdcluster_worker.model.parallel.rank_layout import PIPELINE_FIELD, TENSOR_FIELD, check_divides
from pdcluster_worker.model.parallel.ranks import RankProcesses
from pdcluster_worker.model.parallel.shared import reserve
from pdcluster_worker.system.cgroups import memory_limit

logger = logging.getLogger(__name__)

# of rank 0's heads, or of all where rank 0 transfers all (`ParallelRank.moved_heads`)
RanksCache = KVCache | DeviceKVCache | RanksDeviceCache


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
        loaded.checkpoint.architecture.intermediate_size,
        geometry.num_layers,
    )
    on_device = _on_cpus if device == "cpu" else _on_gpus
    cache, forward = on_device(loaded, engine, limits, ranks)
    logger.info(
        "reserved kv cache blocks=%d block_bytes=%d ranks=%d",
        cache.num_blocks,
        block_num_bytes(geometry),
        ranks.place.num_ranks,
    )
    return cache, forward


def _on_cpus(
    loaded: LoadedModel, engine: EngineConfig, limits: StepLimits, ranks: RankProcesses
) -> tuple[KVCache, ParallelForward]:
    """All ranks map one cache."""
    geometry = loaded.info.geometry
    num_blocks = blocks_that_fit(geometry, engine)
    num_bytes = num_blocks * block_num_bytes(geometry)
    check_memory(loaded.weight_bytes, num_bytes, engine, memory_limit())
    memory = reserve("KV blocks", num_bytes)
    try:
        cache = KVCache(geometry, num_blocks, memory, ranks.place)
        ranks.open(num_blocks, memory, limits)
    finally:
        os.close(memory)
    decoder, group = _connect(loaded, engine, limits, ranks, cache.part(ranks.place))
    ranks.expect_done()
    return cache, ParallelForward(decoder, ranks, group)


def _on_gpus(
    loaded: LoadedModel, engine: EngineConfig, limits: StepLimits, ranks: RankProcesses
) -> tuple[RanksCache, ParallelForward]:
    """Each rank has its part of the cache on its own GPU.  Raises ModelError for too few GPUs."""
    info, place = loaded.info, ranks.place
    if (count := torch.cuda.device_count()) < place.num_ranks:
        raise ModelError(
            f"{place.num_ranks} ranks need an accelerator each, and this worker sees {count}: "
            "raise the pool's gpusPerReplica"
        )
    device = rank_device("cuda", place.rank)
    num_blocks = blocks_on_devices(
        info.geometry, engine, place, info.vocab_size, loaded.weight_bytes
    )
    if place.pipeline_size == 1:
        cache = rank_cache(info.geometry, num_blocks, place, device)
        ranks.open(num_blocks, None, limits)
        decoder, group = _connect(loaded, engine, limits, ranks, cache.tensor)
        ranks.expect_done()
        return cache, ParallelForward(decoder, ranks, group)
    own = open_part(info.geometry, num_blocks, place, device)
    ranks.open(num_blocks, None, limits)
    decoder, group = _connect(loaded, engine, limits, ranks, own)
    others = zip(place.others(), ranks.expect_done(), strict=True)
    parts = [
        (place, own),
        *((other, mapped(handle, info.geometry, num_blocks, other)) for other, handle in others),
    ]
    return RanksDeviceCache(info.geometry, num_blocks, parts), ParallelForward(
        decoder, ranks, group
    )


def _connect(
    loaded: LoadedModel,
    engine: EngineConfig,
    limits: StepLimits,
    ranks: RankProcesses,
    part: Tensor,
) -> tuple[Decoder, RankGroup]:
    """Rank 0's decoder over its part of the cache."""
    group = RankGroup(ranks.place, ranks.store, part.device)
    shape = ranks.place.shape(loaded.attention)
    operations = make_operations(part, shape, limits, invariant=engine.batch_invariant, group=group)
    assert loaded.checkpoint is not None
    weights = pack_decoder(loaded.checkpoint, loaded.info.max_model_len, operations, ranks.place)
    decoder = Decoder(operations, weights, shape.num_heads * shape.head_dim, group)
    logger.info(
        "computes with operations=%s code=%s ranks=%d",
        operations.name,
        decoder.code,
        ranks.place.num_ranks,
    )
    return decoder, group
