"""Memory for KV blocks, packed weights and plans: private, or shared by an engine's ranks."""

import contextlib
import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Any

import torch

from pdcluster_worker.errors import ModelError

_DONT_NEED = 4  # MADV_DONTNEED
_MAPPING = re.compile(r"^(?=[0-9a-f]+-[0-9a-f]+ )", re.MULTILINE)
_CODE = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) r-xp .*/[^/\n]*\.so[^/\n]*\n(?:.*\n)*?Anonymous: +0 kB\n"
    r"(?:.*\n)*?Swap: +0 kB\n"
)

FIX = "lower engine.kvCacheMemory or engine.numBlocks"


def reserve_private(name: str, num_bytes: int, fix: str = FIX) -> mmap.mmap:
    """Zeroed and page-aligned, in huge pages where possible; pages are taken on first use.

    Raises ModelError.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as e:
        raise _refusal(f"reserve {num_bytes} bytes for {name}", e, fix) from e
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def reserve_pinned(num_bytes: int) -> Any:
    """Host memory that a GPU copies from and to without a buffer between.  Raises ModelError."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
    except RuntimeError as e:
        raise ModelError(f"cannot pin {num_bytes} bytes of engine.kvTiers: lower its size") from e


def reserve_shared(name: str, num_bytes: int) -> int:
    """Descriptor of zeroed memory, to pass to processes.  Raises ModelError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as e:
        os.close(descriptor)
        raise _refusal(f"reserve {num_bytes} bytes for {name}", e) from e
    return descriptor


def attach(descriptor: int) -> mmap.mmap:
    """The descriptor stays the caller's.  Raises ModelError."""
    num_bytes = os.fstat(descriptor).st_size
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, OverflowError) as e:
        raise _refusal(f"map {num_bytes} bytes", e) from e


def _refusal(failed: str, error: Exception, fix: str = FIX) -> ModelError:
    return ModelError(f"cannot {failed} ({getattr(error, 'strerror', None) or error}): {fix}")


def release_library_pages() -> None:
    """Unmap code of shared libraries that is needed only while loading.

    torch from PyPI loads CUDA's libraries on a CPU too: most of 0.16 GB of resident code.
    """
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        smaps = Path("/proc/self/smaps").read_text(errors="surrogateescape")
        for start, end in unchanged_ranges(smaps):
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def unchanged_ranges(smaps: str) -> list[tuple[int, int]]:
    """(first, end) addresses of mappings with unmodified code; relocated pages would be lost.

    smaps: text of /proc/PID/smaps.
    """
    found = (_CODE.match(mapping) for mapping in _MAPPING.split(smaps))
    return [(int(code[1], 16), int(code[2], 16)) for code in found if code is not None]
