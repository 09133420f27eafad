"""The longest request that a KV pool holds: a length that was asked for is refused above it, one
that was not is lowered.
"""

import logging
from dataclasses import replace

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.window import most_blocks, most_tokens
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.model.device_cache import DeviceKVCache
from pdcluster_worker.model.kv_cache import KVCache, block_num_bytes
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.parallel.device_parts import RanksDeviceCache

logger = logging.getLogger(__name__)


LEAST_TOKENS = 2
"""Fewest tokens of a request: one of its prompt and one of its answer."""


def fit_length(
    info: ModelInfo, cache: KVCache | DeviceKVCache | RanksDeviceCache, engine: EngineConfig
) -> ModelInfo:
    """The model's facts with a length that the pool holds; its note says so where that is lower.

    Raises ModelError with the bytes needed where engine.maxModelLen asks for more.
    """
    size, wanted = engine.block_size, info.max_model_len
    num_aside = 0 if info.window is None else 1  # the null block
    sizes = EngineSettings(
        block_size=size,
        num_blocks=cache.num_blocks - num_aside,
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=wanted,
        window=info.window,
    )
    held = most_tokens(sizes)
    if held is None or held >= wanted:
        return info
    block_bytes = block_num_bytes(info.geometry)
    needed = 1 + most_blocks(wanted, sizes)  # one to spare for a hand-over, or the null block
    room = (
        f"one request of {wanted} tokens takes {needed} KV blocks ({needed * block_bytes} bytes), "
        "and there are "
        f"{cache.num_blocks} ({cache.num_blocks * block_bytes} bytes, room for {held} tokens)"
    )
    raised = _raised(engine, needed, block_bytes)
    if held < LEAST_TOKENS:
        raise ModelError(f"the KV blocks hold no request: {room}: {raised}")
    if engine.max_model_len is not None:
        raise ModelError(
            f"engine.maxModelLen={engine.max_model_len} does not fit: {room}: {raised}, or lower "
            f"maxModelLen to {held}"
        )
    note = (
        f"the model's length of {wanted} tokens is lowered to {held}: {room}; for longer ones "
        f"{raised}"
    )
    logger.warning(note)
    return replace(info, max_model_len=held, length_note=note)


def _raised(engine: EngineConfig, num_blocks: int, block_bytes: int) -> str:
    """The fix, in the field that decides on the pool's size."""
    size = engine.data_parallel_size
    of_all = f", which {size} engines share" if size > 1 else ""
    if engine.num_blocks is not None:
        return f"raise engine.numBlocks to {size * num_blocks}{of_all}"
    if engine.device_memory_share is not None:
        return (
            f"raise engine.deviceMemoryShare, to leave KV blocks {num_blocks * block_bytes} bytes"
        )
    return f"raise engine.kvCacheMemory to {size * num_blocks * block_bytes}{of_all}"
