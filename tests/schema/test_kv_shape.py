"""KV of a sequence by published config.json files."""

from typing import Any

import pytest

from pdcluster_schema.kv_shape import KVShape, language_config
from tests.schema.model_configs import DEEPSEEK_R1, GPT_OSS_120B, HEADS, LLAMA_70B, QWEN3_NEXT


@pytest.mark.parametrize(
    ("config", "tokens", "values"),
    [
        (LLAMA_70B, 1, 80 * 8 * 128 * 2),
        (DEEPSEEK_R1, 1, 61 * 576),  # one latent, and no values beside it
        (GPT_OSS_120B, 1000, 8 * 64 * 2 * (18 * 1000 + 18 * 128)),
        (QWEN3_NEXT, 10, 12 * 2 * 256 * 2 * 10),  # the other layers keep a state
        ({**HEADS, "sliding_window": 8}, 20, 4 * 4 * 16 * 2 * 8),
        ({**HEADS, "sliding_window": 8, "use_sliding_window": False}, 20, 4 * 4 * 16 * 2 * 20),
        (
            {**HEADS, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            20,
            4 * 16 * 2 * (3 * 20 + 8),
        ),
        (
            {**HEADS, "sliding_window": 8, "sliding_window_pattern": 4},
            20,
            4 * 16 * 2 * (20 + 3 * 8),
        ),
        ({**HEADS, "num_kv_shared_layers": 1}, 20, 3 * 4 * 16 * 2 * 20),
        ({**HEADS, "hybrid_override_pattern": "M-*M"}, 20, 4 * 16 * 2 * 20),
    ],
)
def test_kv_of_a_sequence_is_that_of_its_layers(
    config: dict[str, Any], tokens: int, values: int
) -> None:
    assert KVShape.of(config).values(tokens) == values


@pytest.mark.parametrize(
    "document",
    [
        HEADS,
        *({name: HEADS} for name in ("text_config", "llm_config", "language_config")),
        {"thinker_config": {"text_config": HEADS, "vocab_size": 1}, "vision_config": {"depth": 2}},
        {"text_config": None, "llm_config": [1], **HEADS},
    ],
)
def test_the_language_model_is_found_where_a_config_has_it(document: dict[str, Any]) -> None:
    assert KVShape.of(language_config(document)) == KVShape.of(HEADS)


@pytest.mark.parametrize("document", [[], None, "x", 3])
def test_a_config_that_is_no_map_is_refused(document: Any) -> None:
    with pytest.raises(TypeError):
        language_config(document)


def test_a_pool_of_one_kind_of_block_keeps_all_tokens_unless_each_layer_has_a_window() -> None:
    mixed, windows = KVShape.of(GPT_OSS_120B), KVShape.of({**HEADS, "sliding_window": 8})

    assert mixed.values(1000, by_layer=False) == 8 * 64 * 2 * 36 * 1000
    assert windows.values(20, by_layer=False) == windows.values(20)


@pytest.mark.parametrize(
    ("config", "ranks", "share"),
    [(LLAMA_70B, 8, 1 / 8), (LLAMA_70B, 16, 1 / 8), (LLAMA_70B, 3, 3 / 8), (DEEPSEEK_R1, 8, 1.0)],
)
def test_ranks_hold_whole_heads(config: dict[str, Any], ranks: int, share: float) -> None:
    assert KVShape.of(config).share(ranks) == share


@pytest.mark.parametrize("config", [{}, {**HEADS, "mamba_d_state": 16}, {"head_dim": "x"}])
def test_layers_of_an_unknown_kind_are_not_counted(config: dict[str, Any]) -> None:
    assert not KVShape.of(config).is_known
