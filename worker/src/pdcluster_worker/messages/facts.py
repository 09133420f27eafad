"""Facts of a worker: its device, its KV geometry, and those that a pair of workers compares."""

from dataclasses import dataclass

import msgspec


class KVGeometry(msgspec.Struct, frozen=True):
    """Layout of KV, `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`; equal in a
    pair.
    """

    num_kv_heads: int
    head_dim: int
    num_layers: int
    block_size: int
    dtype: str
    kind: str = "dense"


UNKNOWN_DEVICE = "unknown"
"""Kind of a device that a stock engine does not say; the note has the reason."""


class DeviceFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Device that an engine computes on.

    kind: cpu or cuda; of a stock engine also rocm, tpu, xpu, or unknown
    name: of the processor or the accelerator, as it names itself
    note: what a user must know of computing on it, such as why operations is reference, and the
          fix; empty = nothing
    operations: what the model is computed by, such as "cpu avx512_bf16"; empty until it has loaded
    model_code: whose code computes the layers, decoder or transformers; empty likewise
    tensor_parallel_size, pipeline_parallel_size: its ranks are their product
    """

    kind: str
    name: str
    note: str = ""
    operations: str = ""
    model_code: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Facts of one worker in the handshake.  geometry: of all its ranks together.

    weights: a fingerprint.  operations: as "cpu amx", where engine.batchInvariant promises equal
    bits.
    """

    geometry: KVGeometry
    weights: str
    revision: str
    tensor_parallel_size: int = 1
    operations: str = ""
    model: str = ""
    has_engine: bool = True
