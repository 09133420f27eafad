"""Control of glibc's malloc: which freed memory it keeps, and which it returns."""

import contextlib
import ctypes

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 << 20
_LARGEST_BYTES = 32 << 20  # the largest map threshold that glibc takes


def trim_memory() -> None:
    """Return freed memory to the kernel, which malloc keeps otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Let malloc keep up to 64 MB free; returns whether it does (glibc).

    Else it returns a step's tensors to the kernel and gets zeroed pages again: half the time of a
    norm or a gate of 256 rows (measured).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
