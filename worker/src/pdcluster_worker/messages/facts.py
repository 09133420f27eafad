"""Facts of a worker: its device and its KV geometry."""

import msgspec

OWN_KV = "dense"
"""Kind of the KV of our own engine."""


class KVGeometry(msgspec.Struct, frozen=True):
    """Layout of KV, `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`; equal in a
    pair.
    """

    num_kv_heads: int
    head_dim: int
    num_layers: int
    block_size: int
    dtype: str  # of the cache: bfloat16, float32, int8 or fp8_e4m3
    kind: str = OWN_KV
    computed_dtype: str = ""  # of keys and values before they are stored; empty = the cache's


UNKNOWN_DEVICE = "unknown"
"""Kind of a device that a stock engine does not say; the note has the reason."""


class DeviceFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Device that an engine computes on; its ranks are the product of the two sizes."""

    kind: str  # cpu or cuda; of a stock engine also rocm, tpu, xpu, or unknown
    name: str  # of the processor or the accelerator, as it names itself
    note: str = ""  # what a user must know of computing on it, and the fix
    operations: str = ""  # as "cpu avx512_bf16"; empty until the model has loaded
    model_code: str = ""  # that computes the layers, decoder or transformers; empty likewise
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    engine_note: str = ""  # what a user must know of a stock engine's version
