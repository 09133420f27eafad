"""Memory that a process has freed, given back to the kernel."""

import contextlib
import ctypes


def trim_memory() -> None:
    """Give what was freed back to the kernel, where malloc is glibc's: by itself it keeps it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
