"""Slabs: as many rows of logits as sampling works on at once, by the memory of their temporaries.

A row's result depends neither on the size of a slab nor on the rows beside it.
What a device's temporaries take is reckoned here from the operations that make
them, not measured.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 18
"""Elements of a slab in host memory: a float32 temporary of 1 MiB stays in a core's cache."""
DEVICE_CHUNK = 1 << 24
"""Elements of a slab on a device, where each slab costs launches and a wait: 110 rows of a
vocabulary of 152k tokens.
"""
CHUNK_BYTES = 32
"""Bytes for each element of a slab: eight float32 temporaries.  The most are alive where whole rows
are put in order, since tokens at the edge of a list have equals.
"""


def row_chunks(
    places: NDArray[np.int64], row_elements: int, chunk: int = CHUNK
) -> Iterator[NDArray[np.int64]]:
    """These rows in runs of one slab each, of one row at least."""
    size = max(1, chunk // row_elements)
    for start in range(0, len(places), size):
        yield places[start : start + size]


def device_chunk_bytes(num_elements: int) -> int:
    """Memory of a device for the temporaries of a slab, where logits have so many elements."""
    return CHUNK_BYTES * min(DEVICE_CHUNK, num_elements)
