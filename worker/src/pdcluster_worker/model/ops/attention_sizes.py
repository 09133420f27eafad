"""Tile sizes of the attention kernels, fixed per model and cache: no sum depends on a batch."""

from dataclasses import dataclass

import torch

from pdcluster_worker.model.ops.operations import AttentionShape

MAX_SPLITS = 32  # of one sequence

_MIN_SPLIT_KEYS = 256
_MIN_ROWS = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    decode_rows: int  # query heads of one KV head, padded
    chunk_rows: int  # (row, head) pairs of one program
    dim_block: int  # head_dim, padded
    key_block: int  # keys of one product
    split_keys: int  # keys of one split of a short context
    doublings: int  # of split_keys for the longest context
    max_splits: int
    warps: int
    stages: int = 2  # loads of keys in flight

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, longest: int) -> "AttentionSizes":
        """longest: tokens of the longest context."""
        dim_block = max(_MIN_ROWS, power_of_two(shape.head_dim))
        row_bytes = dim_block * dtype.itemsize
        longest_split = max(_MIN_SPLIT_KEYS, power_of_two(-(-longest // MAX_SPLITS)))
        return cls(
            decode_rows=max(_MIN_ROWS, power_of_two(shape.num_heads // shape.num_kv_heads)),
            chunk_rows=64 if dtype == torch.bfloat16 else 32,  # float32 has no tensor cores here
            dim_block=dim_block,
            # Keys and values of the stages in flight must fit into shared memory.
            key_block=64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16,
            split_keys=_MIN_SPLIT_KEYS,
            doublings=(longest_split // _MIN_SPLIT_KEYS).bit_length() - 1,
            max_splits=min(MAX_SPLITS, -(-longest // _MIN_SPLIT_KEYS)),
            # Without tensor cores a tile of float32 spills from the registers of four.
            warps=4 if dtype == torch.bfloat16 else 8,
        )


def power_of_two(number: int) -> int:
    """Smallest power of two >= number >= 1."""
    return 1 << (number - 1).bit_length()
