"""Blocks that fit, the length that a small pool holds, and the fix where it holds too little."""

from typing import Any

import pytest
import torch

from pdcluster_worker.config.engine import EngineConfig, KvTierConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine_settings import SpeculationSettings
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model import kv_cache
from pdcluster_worker.model.kv_cache import KVCache, open_cache
from pdcluster_worker.model.kv_size import (
    STEP_BYTES_PER_TOKEN,
    block_num_bytes,
    blocks_that_fit,
    check_host_tier,
    check_memory,
    device_blocks,
    fit_length,
    logits_bytes,
    raised,
)
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.step_plan import row_sizes

GEOMETRY = KVGeometry(num_kv_heads=2, head_dim=16, num_layers=2, block_size=16, dtype="float32")
BLOCK_BYTES = block_num_bytes(GEOMETRY)
DRAFTED = SpeculationSettings(method="draft", draft_model="/draft")


def fitted(
    num_blocks: int, window: int | None = None, drafts_for: EngineConfig | None = None, **given: Any
) -> ModelInfo:
    """Facts of a model of 8192 tokens over so many blocks."""
    length = min(8192, given.get("max_model_len") or 8192)
    info = ModelInfo(GEOMETRY, "w", "float32", length, 100, (window, window))
    if drafts_for is None:
        given["num_blocks"] = num_blocks
    engine = EngineConfig(**given)
    return fit_length(info, num_blocks, engine, drafts_for)


def refusal(engine: EngineConfig, drafts_for: EngineConfig | None = None) -> str:
    """Refusal of these blocks."""
    with pytest.raises(ModelError) as refused:
        blocks_that_fit(GEOMETRY, engine, drafts_for)
    return str(refused.value)


def test_draft_model_is_opened_for_the_short_length_of_its_engine() -> None:
    info = fitted(4, drafts_for=EngineConfig(max_model_len=48))
    assert (info.max_model_len, info.length_note) == (48, "")
    less = fitted(2, drafts_for=EngineConfig(max_model_len=200))
    assert less.max_model_len == 16
    assert less.length_note.endswith(
        "raise engine.kvCacheMemory, which the model and its draft model divide"
    )


def test_draft_model_of_no_use_is_refused_without_figures_of_its_share() -> None:
    with pytest.raises(ModelError) as refused:
        fitted(4, drafts_for=EngineConfig())
    assert str(refused.value).endswith(
        "raise engine.kvCacheMemory, which the model and its draft model divide, or set "
        "engine.maxModelLen to 48"
    )
    short = EngineConfig(max_model_len=16)
    found = refusal(EngineConfig(kv_cache_memory=100), short)
    assert "2 are needed for a request of 16 tokens: raise engine.kvCacheMemory, which" in found


@pytest.mark.parametrize("window", [None, 24, 4096])
@pytest.mark.parametrize("requested", [None, 16, 48, 64, 65, 300, 5000])
def test_least_that_a_refusal_names_is_the_least_that_is_accepted(
    window: int | None, requested: int | None
) -> None:
    """Blocks that it names suffice and one fewer do not; its length fits and one more does not."""
    with pytest.raises(ModelError) as refused:
        fitted(1, window, max_model_len=requested)
    least = int(str(refused.value).split("engine.numBlocks to ")[1].split(",")[0])
    if requested is not None and requested > 16:
        with pytest.raises(ModelError, match="does not fit: ") as refused:
            fitted(2, window, max_model_len=requested)
        least = int(str(refused.value).split("engine.numBlocks to ")[1].split(",")[0])
        held = int(str(refused.value).rpartition(" ")[2])
        assert fitted(2, window, max_model_len=held).max_model_len == held
        with pytest.raises(ModelError):
            fitted(2, window, max_model_len=held + 1)
    assert fitted(least, window, max_model_len=requested).max_model_len >= (requested or 64)
    with pytest.raises(ModelError):
        fitted(least - 1, window, max_model_len=requested)


def test_window_takes_the_null_block_and_no_other_of_a_request() -> None:
    assert fitted(5, 4096).max_model_len == 64
    with pytest.raises(ModelError, match=r"to 5, or set engine\.maxModelLen to 48$"):
        fitted(4, 4096)
    assert fitted(4, 4096, max_model_len=48).max_model_len == 48


def test_fix_is_in_the_figures_of_the_file_that_several_engines_share() -> None:
    assert raised(EngineConfig(num_blocks=8, data_parallel_size=4), 5, 10) == (
        "raise engine.numBlocks to 20, which 4 engines share"
    )
    assert raised(EngineConfig(data_parallel_size=4), 5, 10) == (
        "raise engine.kvCacheMemory to 200, which 4 engines share"
    )
    assert raised(EngineConfig(device_memory_share=0.5, data_parallel_size=4), 5, 10) == (
        "raise engine.deviceMemoryShare, to leave KV blocks of each engine 50 bytes"
    )
    assert raised(EngineConfig(num_blocks=3), 5, 10) == "raise engine.numBlocks to 5"
    divided = "raise engine.kvCacheMemory, which the model and its draft model divide"
    assert raised(EngineConfig(speculation=DRAFTED), 5, 10) == divided
    assert raised(EngineConfig(), 5, 10, is_draft=True) == divided


def test_too_few_blocks_name_what_all_engines_need_for_the_requested_length() -> None:
    assert refusal(EngineConfig(kv_cache_memory=BLOCK_BYTES, data_parallel_size=4)) == (
        f"engine.kvCacheMemory leaves {BLOCK_BYTES} bytes for each engine, which hold 1 KV blocks "
        f"of {BLOCK_BYTES} bytes, but 5 are needed for a request of 64 tokens: raise "
        f"engine.kvCacheMemory to {20 * BLOCK_BYTES}, which 4 engines share"
    )
    assert refusal(EngineConfig(kv_cache_memory=100, max_model_len=16)).endswith(
        f"2 are needed for a request of 16 tokens: raise engine.kvCacheMemory to {2 * BLOCK_BYTES}"
    )


def test_whole_blocks_are_taken() -> None:
    assert BLOCK_BYTES == 2 * 2 * 2 * 16 * 16 * 4
    assert blocks_that_fit(GEOMETRY, EngineConfig(kv_cache_memory=7 * BLOCK_BYTES + 5)) == 7
    assert refusal(EngineConfig(num_blocks=1)).endswith("raise engine.numBlocks to 5")


CPU, GIB = torch.device("cpu"), 1 << 30


def engine_of(share: float | None, **given: Any) -> EngineConfig:
    return EngineConfig(
        device_memory_share=share,
        max_batched_tokens=1024,
        max_sequences=8,
        kv_cache_memory=GIB,
        **given,
    )


STEPS = STEP_BYTES_PER_TOKEN * 1024 + logits_bytes(engine_of(None), 1000)


def test_memory_for_logits_by_hand() -> None:
    """Graphs of 1, 2, 4 and 8 rows; a part of a prompt is of 256 rows, three times over."""
    of_rows = 4 * 1000 * (15 + 3 * 256)
    assert logits_bytes(engine_of(None), 1000) == of_rows + 32 * 256 * 1000
    wide = EngineConfig(max_batched_tokens=1024, max_sequences=1024)
    num_rows = sum(row_sizes(1024)) + 5 * 1024
    assert logits_bytes(wide, 100_000) == 400_000 * num_rows + 32 * (1 << 24)


def test_share_of_a_device_leaves_room_for_weights_and_steps() -> None:
    device = {"vocab_size": 1000, "total": 80 * GIB, "taken": 20 * GIB}
    assert device_blocks(GEOMETRY, engine_of(0.5), **device) == (20 * GIB - STEPS) // BLOCK_BYTES
    assert device_blocks(GEOMETRY, engine_of(None), **device) == GIB // BLOCK_BYTES
    with pytest.raises(ModelError, match="leaves 1 KV blocks"):
        device_blocks(GEOMETRY, engine_of(0.5, num_blocks=1), **device)
    with pytest.raises(ModelError) as refused:
        device_blocks(GEOMETRY, engine_of(0.25), **device)
    for part in (
        "engine.deviceMemoryShare of 0.25",
        str(20 * GIB),
        str(STEPS),
        "raise it",
        "engine.maxBatchedTokens",
    ):
        assert part in str(refused.value)


def test_cache_of_a_cpu_has_no_share_and_fits_into_the_memory_of_this_machine() -> None:
    engine = EngineConfig(device_memory_share=0.9, kv_cache_memory=1 << 20)
    cache = open_cache(GEOMETRY, engine, CPU, vocab_size=1000, weight_bytes=0)
    assert isinstance(cache, KVCache)
    assert cache.num_blocks == (1 << 20) // BLOCK_BYTES
    with pytest.raises(ModelError, match="do not fit into the memory of this worker"):
        open_cache(GEOMETRY, EngineConfig(kv_cache_memory=1 << 50), CPU, 100, GIB)


def test_a_host_tier_that_the_worker_s_memory_does_not_hold_is_refused_on_a_device(monkeypatch):
    engine = EngineConfig(kv_tiers=(KvTierConfig(type="host", size=3 * GIB),))
    check_host_tier(engine, 4 * GIB)
    check_host_tier(engine, None)
    check_host_tier(EngineConfig(), 1)
    monkeypatch.setattr(kv_cache, "memory_limit", lambda: 4 * GIB - 1)
    with pytest.raises(ModelError, match=rf"{4 * GIB} bytes of pinned .* {3 * GIB}.*: lower its"):
        open_cache(GEOMETRY, engine, torch.device("cuda"), 1000, 0)


def test_what_does_not_fit_into_the_memory_of_the_worker_is_refused_with_the_bytes() -> None:
    check_memory(3 * GIB, GIB, EngineConfig(), 4 * GIB)
    check_memory(3 * GIB, GIB, EngineConfig(), None)
    with pytest.raises(ModelError) as refused:
        check_memory(3 * GIB, GIB + 1, EngineConfig(), 4 * GIB)
    words = (str(3 * GIB), str(GIB + 1), str(4 * GIB), "lower engine.kvCacheMemory", "resources")
    assert all(word in str(refused.value) for word in words)
    with pytest.raises(ModelError, match=r"lower engine\.numBlocks, or"):
        check_memory(GIB, GIB, EngineConfig(num_blocks=8), GIB)
    with pytest.raises(ModelError, match=r"9 for experts of a step .* engine\.maxBatchedTokens"):
        check_memory(GIB - 9, 1, EngineConfig(), GIB, expert_bytes=9)
    check_memory(GIB - 10, 1, EngineConfig(), GIB, expert_bytes=9)
    with pytest.raises(ModelError, match="for each of 2 engines"):
        check_memory(GIB, GIB, EngineConfig(data_parallel_size=2, max_sequences=8), 3 * GIB)
