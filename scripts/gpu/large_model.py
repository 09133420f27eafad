"""An 8B llama of random weights on the device: transformers' module, our decoder and runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from setting import DEVICE, REHEARSES

from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.decoder import Decoder
from pdcluster_worker.model.decoder_loader import pack_decoder
from pdcluster_worker.model.kv_cache import DeviceKVCache
from pdcluster_worker.model.loading.architecture import read_architecture
from pdcluster_worker.model.loading.checkpoint import Checkpoint
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.ops.cuda import CudaOperations
from pdcluster_worker.model.ops.operations import AttentionShape, Forward
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.step_plan import StepLimits

BLOCK_SIZE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
if REHEARSES:
    SIZES |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = {**SIZES, "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6}


class Operations(CudaOperations):
    """With no graphs where a CPU rehearses."""

    def prepare(self, forward: Forward) -> Forward:
        """See `CudaOperations.prepare`."""
        if not REHEARSES:
            return super().prepare(forward)
        return lambda plan: forward(self._copy.place(plan))


@dataclass
class Large:
    """module: transformers' own; None once it is dropped."""

    module: Any
    decoder: Decoder
    runner: Runner
    cache: DeviceKVCache


def make_module(seed: int = 0) -> Any:
    """Weights drawn so that a token's logits stand apart, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, attn_implementation="sdpa", pad_token_id=0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return module.eval()


def open_large(
    *, num_blocks: int, max_batched_tokens: int, max_sequences: int, keep_module: bool = False
) -> Large:
    """The runner as a worker's engine has it, over a cache of so many blocks."""
    module = make_module()
    heads, kv_heads, head_dim = (
        SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layers, longest = SIZES["num_hidden_layers"], SIZES["max_position_embeddings"]
    geometry = KVGeometry(kv_heads, head_dim, layers, BLOCK_SIZE, "bfloat16")
    windows: Sequence[int | None] = (None,) * layers
    info = ModelInfo(geometry, "random", "bfloat16", longest, SIZES["vocab_size"], tuple(windows))
    cache = DeviceKVCache(geometry, num_blocks, DEVICE)
    limits = StepLimits(max_batched_tokens, max_sequences, longest, BLOCK_SIZE, max_sequences)
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5)
    operations = Operations(cache.tensor, shape, limits)
    architecture = read_architecture(CONFIG, longest)
    checkpoint = Checkpoint(architecture, torch.bfloat16, module.state_dict())
    weights = pack_decoder(checkpoint, longest, operations)
    decoder = Decoder(operations, weights)
    runner = Runner(info, decoder, cache, limits, depth=2)
    return Large(module if keep_module else None, decoder, runner, cache)
