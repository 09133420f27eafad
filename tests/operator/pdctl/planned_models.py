"""A model, and an engine whose steps can be worked out by hand, to plan for."""

import math

from pdctl.sizing.profile import EngineProfile, RankLayout

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
FAST = EngineProfile(
    gpu="B200",
    layout=RankLayout(2),
    prefill={1: 0.1},
    decode={10: 0.02, 20: 0.03},
    mixed={(1010, 10): 0.12},
    kv_tokens={math.inf: 100_000},
    source="by hand",
)
