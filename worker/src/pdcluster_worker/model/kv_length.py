"""Checks or lowers max_model_len to the longest request that the KV cache holds."""

import logging
from dataclasses import dataclass, replace

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.block_table import most_blocks, most_tokens
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.model.device_cache import DeviceKVCache
from pdcluster_worker.model.kv_cache import KVCache, block_num_bytes
from pdcluster_worker.model.kv_size_advice import LEAST_TOKENS, raised
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.parallel.device_parts import RanksDeviceCache

logger = logging.getLogger(__name__)


def fit_length(
    info: ModelInfo,
    cache: KVCache | DeviceKVCache | RanksDeviceCache,
    engine: EngineConfig,
    drafts_for: EngineConfig | None = None,
) -> ModelInfo:
    """The model's facts with a length that fits; `length_note` explains a lowered one.

    Raises ModelError where engine.maxModelLen, or by default `LEAST_TOKENS`, does not fit.
    """
    is_draft = drafts_for is not None
    requested = engine.max_model_len if drafts_for is None else drafts_for.max_model_len
    if is_draft and requested is not None:
        info = replace(info, max_model_len=min(info.max_model_len, requested))
    size, needed = engine.block_size, info.max_model_len
    num_aside = 0 if info.window is None else 1  # the null block
    sizes = EngineSettings(
        block_size=size,
        num_blocks=cache.num_blocks - num_aside,
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=needed,
        window=info.window,
    )
    held = most_tokens(sizes)
    if held is None or held >= needed:
        return info
    pool = _BlockPool(
        engine, sizes, cache.num_blocks, block_num_bytes(info.geometry), held, is_draft
    )
    least = (
        min(LEAST_TOKENS, needed) if requested is None else 2
    )  # one of the prompt, one of the output
    if held < least:
        shorter = f", or set engine.maxModelLen to {held}" if held >= 2 else ""
        raise ModelError(
            f"the KV blocks hold no request of use: {pool.holds(least)}: {pool.raised(least)}"
            f"{shorter}"
        )
    if requested is not None and not is_draft:
        raise ModelError(
            f"engine.maxModelLen={requested} does not fit: {pool.holds(needed)}: "
            f"{pool.raised(needed)}, or lower maxModelLen to {held}"
        )
    note = (
        f"the model's length of {needed} tokens is lowered to {held}: {pool.holds(needed)}; for "
        f"longer ones {pool.raised(needed)}"
    )
    logger.warning(note)
    return replace(info, max_model_len=held, length_note=note)


@dataclass(frozen=True, slots=True)
class _BlockPool:
    """sizes: without the null block; held: tokens of the longest request."""

    engine: EngineConfig
    sizes: EngineSettings
    num_blocks: int
    block_bytes: int
    held: int
    is_draft: bool

    def needed(self, num_tokens: int) -> int:
        """One block more than the tokens take, for a transfer or the null block."""
        return 1 + most_blocks(num_tokens, self.sizes)

    def holds(self, num_tokens: int) -> str:
        needed = self.needed(num_tokens)
        return (
            f"one request of {num_tokens} tokens takes {needed} KV blocks "
            f"({needed * self.block_bytes} bytes), and there are {self.num_blocks} "
            f"({self.num_blocks * self.block_bytes} bytes, room for {self.held} tokens)"
        )

    def raised(self, num_tokens: int) -> str:
        needed = self.needed(num_tokens)
        return raised(self.engine, needed, self.block_bytes, is_draft=self.is_draft)
