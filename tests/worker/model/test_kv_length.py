"""Small pools of KV blocks: the length that each holds, and the fix where it holds too little."""

from typing import Any

import pytest

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ModelError
from pdcluster_worker.messages.engine_settings import SpeculationSettings
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import block_num_bytes, blocks_that_fit
from pdcluster_worker.model.kv_size import fit_length, raised
from pdcluster_worker.model.loading.loader import ModelInfo

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


def test_draft_model_is_opened_for_the_short_length_that_is_asked_of_its_engine() -> None:
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


def test_window_takes_the_null_block_and_no_other_beside_a_request() -> None:
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


def test_too_few_blocks_name_what_all_engines_need_for_the_length_that_is_asked() -> None:
    assert refusal(EngineConfig(kv_cache_memory=BLOCK_BYTES, data_parallel_size=4)) == (
        f"engine.kvCacheMemory leaves {BLOCK_BYTES} bytes for each engine, which hold 1 KV blocks "
        f"of {BLOCK_BYTES} bytes, but 5 are needed for a request of 64 tokens: raise "
        f"engine.kvCacheMemory to {20 * BLOCK_BYTES}, which 4 engines share"
    )
    assert refusal(EngineConfig(kv_cache_memory=100, max_model_len=16)).endswith(
        f"2 are needed for a request of 16 tokens: raise engine.kvCacheMemory to {2 * BLOCK_BYTES}"
    )
