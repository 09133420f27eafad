"""Number of KV blocks, and the longest request that they hold, or the refusal with the fix.

Messages name the fields and figures of the worker's config file.
"""

import logging
import math
from dataclasses import replace

import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.engine.block_table import most_blocks, most_tokens
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.loading.loader import DTYPES, ModelInfo
from pdcluster_worker.model.ops.stored_kv import StoredKV
from pdcluster_worker.model.prompt_logprobs import MOST_ROWS
from pdcluster_worker.model.sampling.picking import device_chunk_bytes
from pdcluster_worker.model.step_plan import row_sizes

logger = logging.getLogger(__name__)

# shortest useful request: a chat template takes about 30 tokens, a default completion 16
LEAST_TOKENS = 64
LEAST_BLOCKS = 2  # one request needs two to decode past a block

# memory of a step without weights and KV blocks, per token of its budget: an estimate
STEP_BYTES_PER_TOKEN = 512 << 10
# of a step's logits, without the graphs': its own, rows with masks, masked rows, all rows, booleans
SAMPLING_COPIES = 5
SCORING_COPIES = 3  # of a part's logits: its own, the scored rows, and booleans of the sampled rows


QUANTIZED = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
_SCALE_BYTES = 4


def cache_tensor(geometry: KVGeometry, num_blocks: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a cache: `[blocks, Hkv, layers, 2, block_size, D]`.

    If quantized, bytes `[..., 2, n]`, a row for each token and then a scale for each.
    """
    sizes = num_blocks, geometry.num_kv_heads, geometry.num_layers, 2
    if geometry.dtype in QUANTIZED:
        return torch.uint8, (*sizes, _scales_at(geometry) + _SCALE_BYTES * geometry.block_size)
    return DTYPES[geometry.dtype], (*sizes, geometry.block_size, geometry.head_dim)


def stored_kv(cache: torch.Tensor, geometry: KVGeometry) -> StoredKV:
    """Views of a cache, or of some of its heads and layers."""
    if geometry.dtype not in QUANTIZED:
        return StoredKV(cache, None, DTYPES[geometry.computed_dtype or geometry.dtype])
    size, dim = geometry.block_size, geometry.head_dim
    rows = cache[..., : size * dim].view(QUANTIZED[geometry.dtype])
    scales = cache[..., _scales_at(geometry) :].view(torch.float32)
    return StoredKV(torch.unflatten(rows, -1, (size, dim)), scales, DTYPES[geometry.computed_dtype])


def _scales_at(geometry: KVGeometry) -> int:
    """Bytes of a block's keys or values in one head and layer, in whole scales."""
    num_scales = -(-geometry.block_size * geometry.head_dim // _SCALE_BYTES)
    return num_scales * _SCALE_BYTES


def block_num_bytes(geometry: KVGeometry) -> int:
    dtype, shape = cache_tensor(geometry, 1)
    return math.prod(shape) * dtype.itemsize


def blocks_that_fit(
    geometry: KVGeometry, engine: EngineConfig, drafts_for: EngineConfig | None = None
) -> int:
    """`numBlocks`, or what `kvCacheMemory` holds.  Raises ModelError for fewer than `LEAST_BLOCKS`.

    drafts_for: the engine that this draft model is for; None = not a draft model.
    """
    block_bytes, num_blocks = block_num_bytes(geometry), engine.num_blocks
    of_each = " for each engine" if engine.data_parallel_size > 1 else ""
    found = f"engine.numBlocks leaves {num_blocks} KV blocks{of_each}"
    if num_blocks is None:
        num_blocks = engine.kv_cache_memory // block_bytes
        found = (
            f"engine.kvCacheMemory leaves {engine.kv_cache_memory} bytes{of_each}, which hold "
            f"{num_blocks} KV blocks of {block_bytes} bytes"
        )
    if num_blocks >= LEAST_BLOCKS:
        return num_blocks
    num_tokens = engine.max_model_len or LEAST_TOKENS
    if drafts_for is not None:  # need not hold the longest request
        num_tokens = min(drafts_for.max_model_len or LEAST_TOKENS, LEAST_TOKENS)
    needed = 1 + -(-num_tokens // engine.block_size)  # one to spare, or the null block
    fix = raised(engine, needed, block_bytes, is_draft=drafts_for is not None)
    raise ModelError(
        f"{found}, but {needed} are needed for a request of {num_tokens} tokens: {fix}"
    )


def device_blocks(
    geometry: KVGeometry,
    engine: EngineConfig,
    vocab_size: int,
    *,
    total: int,
    taken: int,
    drafts_for: EngineConfig | None = None,
) -> int:
    """`numBlocks`, or what weights and steps leave of `deviceMemoryShare`, else `kvCacheMemory`.

    total: bytes of the device; taken: of them, with the weights, by all processes.
    """
    share = engine.device_memory_share
    if share is None or engine.num_blocks is not None:
        return blocks_that_fit(geometry, engine, drafts_for)
    steps = STEP_BYTES_PER_TOKEN * engine.max_batched_tokens + logits_bytes(engine, vocab_size)
    left = int(share * total) - taken - steps
    if left < LEAST_BLOCKS * block_num_bytes(geometry):
        raise ModelError(
            f"engine.deviceMemoryShare of {share} is {int(share * total)} bytes of this device, of "
            f"which {taken} are taken (weights and other processes) and {steps} are for steps, so "
            "no KV blocks fit: raise it, lower engine.maxBatchedTokens or engine.maxSequences, or "
            "use a larger device"
        )
    return left // block_num_bytes(geometry)


def logits_bytes(engine: EngineConfig, vocab_size: int) -> int:
    """Device memory for float32 logits and sampling: calculated, not measured."""
    most = engine.max_decode_rows
    copies = max(SAMPLING_COPIES * most, SCORING_COPIES * MOST_ROWS)
    num_rows = sum(row_sizes(most)) + copies  # each decode graph keeps its logits
    return 4 * vocab_size * num_rows + device_chunk_bytes(vocab_size * max(most, MOST_ROWS))


def check_memory(
    weight_bytes: int,
    kv_bytes: int,
    engine: EngineConfig,
    limit: int | None,
    *,
    adapter_bytes: int = 0,
    expert_bytes: int = 0,
) -> None:
    """Refuse what the kernel would kill later: pages are only taken when they are used.

    limit: memory of the container or the machine; None = unknown.  adapter_bytes: of the weights.
    expert_bytes: of the longest step.  Raises ModelError.
    """
    each_bytes = weight_bytes + kv_bytes + expert_bytes + engine.host_tier_bytes
    needed = each_bytes * engine.data_parallel_size
    if limit is not None and needed > limit:
        each = f" for each of {engine.data_parallel_size} engines"
        field = "numBlocks" if engine.num_blocks else "kvCacheMemory"
        tier = f", {engine.host_tier_bytes} of engine.kvTiers" if engine.host_tier_bytes else ""
        adapters = f" ({adapter_bytes} of adapters)" if adapter_bytes else ""
        steps = f", {expert_bytes} for experts of a step" if expert_bytes else ""
        shorter = " or engine.maxBatchedTokens" if expert_bytes else ""
        fewer = ", have less of model.adapters or model.runtimeAdapters" if adapter_bytes else ""
        raise ModelError(
            f"{weight_bytes} bytes of weights{adapters}{tier}{steps} and {kv_bytes} of KV blocks"
            f"{each if engine.data_parallel_size > 1 else ''} do not fit into the memory of this "
            f"worker, {limit} bytes: lower engine.{field}{shorter}{fewer}, or give it more (in a "
            "cluster: the memory limit of its role's resources)"
        )


def check_host_tier(engine: EngineConfig, limit: int | None) -> None:
    """Refuse a host tier that memory does not hold, of a worker whose KV is on a device.

    limit: memory of the container or the machine; None = unknown.  Raises ModelError.
    """
    if limit is None or not engine.host_tier_bytes:
        return
    # torch rounds pinned memory up to a power of two
    needed = (1 << (engine.host_tier_bytes - 1).bit_length()) * engine.data_parallel_size
    if needed > limit:
        raise ModelError(
            f"engine.kvTiers of type host takes {needed} bytes of pinned memory (its size of "
            f"{engine.host_tier_bytes}, up to a power of two, in each engine), and this worker has "
            f"{limit} bytes: lower its size, or give the worker more (in a cluster: the memory "
            "limit of its role's resources)"
        )


def fit_length(
    info: ModelInfo, num_blocks: int, engine: EngineConfig, drafts_for: EngineConfig | None = None
) -> ModelInfo:
    """The model's facts with a length that fits; `length_note` explains a lowered one.

    Raises ModelError where engine.maxModelLen, or by default `LEAST_TOKENS`, does not fit.
    """
    is_draft = drafts_for is not None
    requested = engine.max_model_len if drafts_for is None else drafts_for.max_model_len
    if is_draft and requested is not None:
        info = replace(info, max_model_len=min(info.max_model_len, requested))
    longest = info.max_model_len
    sizes = EngineSettings(
        block_size=engine.block_size,
        num_blocks=num_blocks if info.window is None else num_blocks - 1,  # the null block
        max_batched_tokens=engine.max_batched_tokens,
        max_sequences=engine.max_sequences,
        max_model_len=longest,
        window=info.window,
    )
    held = most_tokens(sizes)
    if held is None or held >= longest:
        return info
    # of the prompt and of the output one each
    least = min(LEAST_TOKENS, longest) if requested is None else 2
    must_hold = requested is not None and not is_draft
    num_tokens = least if held < least else longest
    # one block more than the tokens take, for a transfer or the null block
    needed, block_bytes = 1 + most_blocks(num_tokens, sizes), block_num_bytes(info.geometry)
    facts = (
        f"one request of {num_tokens} tokens takes {needed} KV blocks "
        f"({needed * block_bytes} bytes), and there are {num_blocks} "
        f"({num_blocks * block_bytes} bytes, room for {held} tokens)"
    )
    fix = raised(engine, needed, block_bytes, is_draft=is_draft)
    if held < least:
        shorter = f", or set engine.maxModelLen to {held}" if held >= 2 else ""
        raise ModelError(f"the KV blocks hold no request of use: {facts}: {fix}{shorter}")
    if must_hold:
        raise ModelError(
            f"engine.maxModelLen={requested} does not fit: {facts}: {fix}, or lower maxModelLen to "
            f"{held}"
        )
    note = (
        f"the model's length of {longest} tokens is lowered to {held}: {facts}; for longer ones "
        f"{fix}"
    )
    logger.warning(note)
    return replace(info, max_model_len=held, length_note=note)


def raised(
    engine: EngineConfig, num_blocks: int, block_bytes: int, *, is_draft: bool = False
) -> str:
    """is_draft: of a draft model's cache, without a figure: it shares the engine's memory."""
    size, num_bytes = engine.data_parallel_size, num_blocks * block_bytes
    of_all = f", which {size} engines share" if size > 1 else ""
    if engine.num_blocks is not None:
        return f"raise engine.numBlocks to {size * num_blocks}{of_all}"
    by_share = engine.device_memory_share is not None
    field = "engine.deviceMemoryShare" if by_share else "engine.kvCacheMemory"
    if is_draft or (engine.drafts is not None and engine.drafts.draft_model is not None):
        return f"raise {field}, which the model and its draft model divide"
    if by_share:
        of_each = " of each engine" if size > 1 else ""
        return f"raise {field}, to leave KV blocks{of_each} {num_bytes} bytes"
    return f"raise {field} to {size * num_bytes}{of_all}"
