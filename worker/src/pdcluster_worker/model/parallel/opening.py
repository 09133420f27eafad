"""Opens a model over several ranks: the shared KV cache, rank 0's part of the weights, and the proof over all ranks.

Our own decoder alone is divided.  Its logits over all ranks are compared with
those of transformers' module in this process before it serves (`model.proof`).
"""

import logging
import os
from pathlib import Path

import torch

from pdcluster_worker.config import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.assembly import prove
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.families import NotOursError, read_weights, traits_of
from pdcluster_worker.model.kv_cache import KVCache, block_num_bytes, blocks_that_fit
from pdcluster_worker.model.loader import LoadedModel
from pdcluster_worker.model.ops.choose import make_operations
from pdcluster_worker.model.ops.step_limits import StepLimits
from pdcluster_worker.model.parallel.forward import ParallelForward
from pdcluster_worker.model.parallel.group import RankGroup
from pdcluster_worker.model.parallel.place import PIPELINE_FIELD, TENSOR_FIELD, check_divides
from pdcluster_worker.model.parallel.ranks import Ranks
from pdcluster_worker.model.parallel.shared import reserve

logger = logging.getLogger(__name__)


def open_ranks(loaded: LoadedModel, engine: EngineConfig, limits: StepLimits, ranks: Ranks) -> tuple[KVCache, ParallelForward]:
    """The KV cache of all ranks together, and the forward pass over them.

    Raises ModelError for a model that cannot be divided so, that is not our decoder's, or that a rank cannot load.
    """
    geometry = loaded.info.geometry
    if engine.batch_invariant and ranks.place.tensor_size > 1:
        raise ModelError(
            f"engine.batchInvariant is for {TENSOR_FIELD} 1, not {ranks.place.tensor_size}: sums over ranks round in another order; "
            "leave one of them out"
        )
    try:
        traits_of(loaded.module)
        check_divides(ranks.place, loaded.attention, loaded.module.config.intermediate_size, geometry.num_layers)
        num_blocks = engine.num_blocks or blocks_that_fit(geometry, engine.kv_cache_memory)
        memory = reserve("KV blocks", num_blocks * block_num_bytes(geometry))
        try:
            cache = KVCache(geometry, num_blocks, memory)
            ranks.open(num_blocks, memory, limits)
        finally:
            os.close(memory)
        logger.info("reserved kv cache blocks=%d block_bytes=%d ranks=%d", num_blocks, cache.block_bytes, ranks.place.num_ranks)
        forward = _connect(loaded, engine, limits, ranks, cache)
        prove(forward, loaded, num_blocks)
    except NotOursError as e:
        raise ModelError(f"{e}; such a model runs on one rank only: set {TENSOR_FIELD} and {PIPELINE_FIELD} to 1") from e
    return cache, forward


def _connect(loaded: LoadedModel, engine: EngineConfig, limits: StepLimits, ranks: Ranks, cache: KVCache) -> ParallelForward:
    group = RankGroup(ranks.place, Path(ranks.store), torch.device("cpu"))
    shape = ranks.place.shape(loaded.attention)
    operations = make_operations(cache.part(ranks.place), shape, limits, invariant=engine.batch_invariant, group=group)
    weights = read_weights(loaded.module, loaded.info.max_model_len, operations, loaded.info.windows, ranks.place)
    decoder = Decoder(operations, weights, shape.num_heads * shape.head_dim, group)
    ranks.expect_ready()
    logger.info("computes with operations=%s code=%s ranks=%d", operations.name, decoder.code, ranks.place.num_ranks)
    return ParallelForward(decoder, ranks, group)
