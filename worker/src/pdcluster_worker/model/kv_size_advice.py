"""Messages about a too small KV cache, in the fields and figures of the worker's config file."""

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError

# shortest useful request: a chat template takes about 30 tokens, a default completion 16
LEAST_TOKENS = 64

LEAST_BLOCKS = 2  # one request needs two to decode past a block


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
    if is_draft or _has_draft_model(engine):
        return f"raise {field}, which the model and its draft model divide"
    if by_share:
        of_each = " of each engine" if size > 1 else ""
        return f"raise {field}, to leave KV blocks{of_each} {num_bytes} bytes"
    return f"raise {field} to {size * num_bytes}{of_all}"


def check_num_blocks(
    num_blocks: int,
    engine: EngineConfig,
    block_bytes: int,
    drafts_for: EngineConfig | None = None,
) -> None:
    """Raise ModelError for fewer than `LEAST_BLOCKS`."""
    if num_blocks >= LEAST_BLOCKS:
        return
    num_tokens = _request_tokens(engine, drafts_for)
    needed = 1 + -(-num_tokens // engine.block_size)  # one to spare, or the null block
    of_each = " for each engine" if engine.data_parallel_size > 1 else ""
    if engine.num_blocks is not None:
        found = f"engine.numBlocks leaves {num_blocks} KV blocks{of_each}"
    else:
        found = (
            f"engine.kvCacheMemory leaves {engine.kv_cache_memory} bytes{of_each}, which hold "
            f"{num_blocks} KV blocks of {block_bytes} bytes"
        )
    fix = raised(engine, needed, block_bytes, is_draft=drafts_for is not None)
    raise ModelError(
        f"{found}, but {needed} are needed for a request of {num_tokens} tokens: {fix}"
    )


def _has_draft_model(engine: EngineConfig) -> bool:
    return engine.drafts is not None and engine.drafts.draft_model is not None


def _request_tokens(engine: EngineConfig, drafts_for: EngineConfig | None) -> int:
    """Tokens that the cache must hold; a draft model's need not hold the longest request."""
    if drafts_for is None:
        return engine.max_model_len or LEAST_TOKENS
    return min(drafts_for.max_model_len or LEAST_TOKENS, LEAST_TOKENS)
