"""Make a tiny random model folder with a working tokenizer: `make_tiny_model.py KIND DIR [SEED]`.

KIND is llama (grouped KV heads), llama-wide (the same with heads of 32, the
least that vLLM takes), llama-heavy (25 MB, for tests that act in the middle of an
answer), llama-mha (as many KV heads as query heads),
mistral (sliding window off, one KV head), qwen2 (biases), qwen3 (query and key
norms), smollm3 (layers without positions), gemma (offset norms, scaled
embedding, tied head), mixtral, few-experts (3 of them),
qwen3-moe (one layer of experts, one without),
gpt-oss (stacked experts, sinks, a window) or olmo2 (none of our decoder's: norms come after).
mistral-window, qwen2-window, gemma3 and olmo3 have sliding windows of WINDOW
tokens: all layers of mistral-window, one of two of the others.  The same
kind and seed give the same weights.  Weights are drawn wide, so that greedy
answers wander over the vocabulary and near ties are rare.  Nothing is
downloaded; the tokenizer is a byte-level BPE trained on one sentence.
"""

import sys
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
CONTEXT = 2048
WINDOW = 24
HEAVY = 16384
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}

CORPUS = (
    "the quick brown fox jumps over the lazy dog while the other foxes think that nothing there "
    "was worth the jump"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_config(kind: str) -> Any:
    """The config of this kind."""
    import transformers

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", {}),
        "llama-wide": ("LlamaConfig", {"head_dim": 32}),
        "llama-heavy": ("LlamaConfig", {"intermediate_size": HEAVY}),
        "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
        "mistral": ("MistralConfig", {"num_key_value_heads": 1, "sliding_window": None}),
        "qwen2": ("Qwen2Config", {}),
        "qwen3": ("Qwen3Config", {}),
        "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
        "gemma": ("GemmaConfig", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
        "mixtral": ("MixtralConfig", {"num_local_experts": 8, "intermediate_size": 96}),
        "few-experts": ("MixtralConfig", {"num_local_experts": 3}),
        "qwen3-moe": (
            "Qwen3MoeConfig",
            {
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
                "mlp_only_layers": [1],
            },
        ),
        "gpt-oss": (
            "GptOssConfig",
            {
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "intermediate_size": 96,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        "olmo2": ("Olmo2Config", {}),
        "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
        "qwen2-window": (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        "gemma3": (
            "Gemma3TextConfig",
            {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        "olmo3": (
            "Olmo3Config",
            {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    }
    if kind not in kinds:
        raise ValueError(f"unknown kind {kind}: choose one of {', '.join(kinds)}")
    name, options = kinds[kind]
    return getattr(transformers, name)(**{**SIZES, "num_key_value_heads": 2, **options})


def make_tokenizer() -> Any:
    """A byte-level BPE of VOCAB_SIZE tokens, special ones first, that decodes every
    byte sequence.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<{number}>", normalized=False) for number in range(missing)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write the model folder (float32 safetensors) and return it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(kind), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # made as 0 or 1, which would hide that they are left out
            if name.endswith(("bias", "sinks")) or "norm" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make_tiny_model(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
