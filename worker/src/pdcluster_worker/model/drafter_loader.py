"""Creates the drafter of speculative decoding: none, n-grams, or a draft model.

A draft model runs in the engine process and shares the engine's KV memory.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pdcluster_schema.kv_shape import language_config
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.drafters import DraftSizes, ModelDrafter, NgramDrafter
from pdcluster_worker.engine.ports import Drafter
from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.parallel.ranks import rank_threads
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.runner_loader import open_runner

logger = logging.getLogger(__name__)

FIELD = "engine.speculation.draftModel"


@dataclass(frozen=True, slots=True)
class KvMemorySplit:
    """Engine settings, and those of the draft model's runner; None without one."""

    engine: EngineConfig
    draft: EngineConfig | None


def divide(model: ModelConfig, engine: EngineConfig) -> KvMemorySplit:
    """Raises ModelError for a draft model with another vocabulary.

    `numBlocks` is the engine's; the draft model has as many in addition.
    """
    drafts = engine.drafts
    if drafts is None or drafts.draft_model is None:
        return KvMemorySplit(engine, None)
    own, other = Path(model.path).expanduser(), Path(drafts.draft_model).expanduser()
    check_vocabulary(own, other)
    share = token_values(other) / (token_values(own) + token_values(other))
    draft_memory = int(engine.kv_cache_memory * share)
    device_share = engine.device_memory_share
    return KvMemorySplit(
        replace(engine, kv_cache_memory=engine.kv_cache_memory - draft_memory),
        replace(
            engine,
            kv_cache_memory=draft_memory,
            device_memory_share=None if device_share is None else device_share * share,
            threads=rank_threads(engine),
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            max_model_len=None,
            quantization="none",
            speculation=None,
        ),
    )


def open_draft_runner(
    model: ModelConfig, division: KvMemorySplit, device: str
) -> tuple[Runner, int] | None:
    """Runner and KV blocks; opened before the engine's cache takes the rest of a GPU."""
    drafts = division.engine.drafts
    if division.draft is None or drafts is None or drafts.draft_model is None:
        return None
    own = ModelConfig(f"{model.name} (drafts)", drafts.draft_model, model.dtype)
    try:
        runner, cache, info = open_runner(own, division.draft, device, drafts_for=division.engine)
    except ModelError as e:
        raise ModelError(f"{FIELD}: {e}") from e
    num_blocks = cache.num_blocks if info.window is None else cache.num_blocks - 1
    logger.info(
        "drafts by a model path=%s blocks=%d tokens=%d",
        drafts.draft_model,
        num_blocks,
        num_blocks * division.draft.block_size,
    )
    return runner, num_blocks


def make_drafter(
    engine: EngineConfig, opened: tuple[Runner, int] | None, info: ModelInfo
) -> Drafter | None:
    """info: of the engine's own model."""
    if engine.drafts is None:
        return None
    if opened is None:
        return NgramDrafter(engine.drafts)
    runner, num_blocks = opened
    own = runner.info
    sizes = DraftSizes(
        num_blocks,
        engine.block_size,
        engine.max_batched_tokens,
        own.max_model_len,
        info.vocab_size,
        own.vocab_size,
    )
    return ModelDrafter(runner, sizes)


def check_vocabulary(model: Path, draft: Path) -> None:
    """Raises ModelError, with the first difference, unless both vocabularies are equal."""
    ours, theirs = vocabulary(model), vocabulary(draft)
    if ours == theirs:
        return
    token_id = min(
        token_id
        for token_id in ours.keys() | theirs.keys()
        if ours.get(token_id) != theirs.get(token_id)
    )
    raise ModelError(
        f"{FIELD}: {draft} has another vocabulary than the model: token {token_id} is "
        f"{theirs.get(token_id)!r} there and "
        f"{ours.get(token_id)!r} here: take a draft model of the same family"
    )


def vocabulary(folder: Path) -> dict[int, str]:
    """Tokens by id, from tokenizer.json.  Raises ModelError."""
    content = _json(folder / "tokenizer.json")
    try:
        found = content["model"]["vocab"]
        pairs = (
            found.items()
            if isinstance(found, dict)
            else ((entry[0], token_id) for token_id, entry in enumerate(found))
        )
        added = ((entry["content"], entry["id"]) for entry in content.get("added_tokens", ()))
        return {token_id: token for token, token_id in (*pairs, *added)}
    except (KeyError, TypeError, IndexError, AttributeError) as e:
        raise ModelError(
            f"{FIELD}: {folder / 'tokenizer.json'} has no vocabulary that can be compared: {e!r}"
        ) from e


def token_values(folder: Path) -> int:
    """Elements of KV cache for one token, from config.json.  Raises ModelError."""
    content = _json(folder / "config.json")
    try:
        sizes = language_config(content)
        heads = sizes["num_attention_heads"]
        dim = sizes.get("head_dim") or sizes["hidden_size"] // heads
        return int(sizes["num_hidden_layers"] * (sizes.get("num_key_value_heads") or heads) * dim)
    except (KeyError, TypeError) as e:
        raise ModelError(
            f"{FIELD}: {folder / 'config.json'} does not say the size of its KV cache: {e!r}"
        ) from e


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise ModelError(f"{FIELD}: {file} cannot be read: {e}") from e
