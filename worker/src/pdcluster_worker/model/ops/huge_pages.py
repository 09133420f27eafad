"""Huge pages for packed weights, which every step reads."""

import mmap

import torch
from torch import Tensor

from pdcluster_worker.errors import ModelError

_MAP_BYTES = 64 << 20
_CACHE_LINE_BYTES = 64


class HugePages:
    """Allocates from large maps, because a map smaller than a huge page has none."""

    def __init__(self) -> None:
        self._map = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to a cache line."""
        if self._used_bytes + num_bytes > len(self._map):
            self._map, self._used_bytes = _new_map(max(num_bytes, _MAP_BYTES)), 0
        piece = self._map[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        return piece


def _new_map(num_bytes: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise ModelError(
            f"no memory for {num_bytes} bytes of packed weights: use a smaller model or a larger "
            "machine"
        ) from e
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
