"""Chunks of logits rows that sampling processes at once, by the memory of temporaries."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 18  # elements in host memory: a float32 temporary of 1 MiB stays in a core's cache
# elements on a device, where each chunk costs launches and a wait: 110 rows of 152k tokens
DEVICE_CHUNK = 1 << 24
# per element: eight float32 temporaries when whole rows are sorted (calculated, not measured)
CHUNK_BYTES = 32


def row_chunks(
    places: NDArray[np.int64], row_elements: int, chunk: int = CHUNK
) -> Iterator[NDArray[np.int64]]:
    """Chunks of at least one row."""
    size = max(1, chunk // row_elements)
    for start in range(0, len(places), size):
        yield places[start : start + size]


def device_chunk_bytes(num_elements: int) -> int:
    return CHUNK_BYTES * min(DEVICE_CHUNK, num_elements)
