"""Memory shared by the rank processes of an engine: anonymous files, passed as descriptors."""

import mmap
import os

from pdcluster_worker.errors import ModelError


def reserve(name: str, num_bytes: int) -> int:
    """Descriptor of zeroed memory; pages are taken on first use.  Raises ModelError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as e:
        os.close(descriptor)
        raise ModelError(
            f"cannot reserve {num_bytes} bytes for {name} ({e.strerror}): lower "
            "engine.kvCacheMemory or engine.numBlocks"
        ) from e
    return descriptor


def attach(descriptor: int) -> mmap.mmap:
    """The descriptor stays the caller's.  Raises ModelError."""
    num_bytes = os.fstat(descriptor).st_size
    try:
        return mmap.mmap(descriptor, num_bytes)
    except (OSError, OverflowError) as e:
        raise ModelError(
            f"cannot map {num_bytes} bytes: lower engine.kvCacheMemory or engine.numBlocks"
        ) from e
