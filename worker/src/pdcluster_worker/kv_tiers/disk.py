"""A tier on a local disk: one file of slots, found again by the next engine that opens it.

    header, 4 KiB    magic, format, fingerprint of everything that the bytes depend on, slot size
    slot             magic, key, number of its write, checksum of all of these and of the block;
                     the block

A slot that is cut off, half written or of another key is a miss.  A write takes the slot's header
away first and puts the new one last.  Blocks of all clients are in the file, under hashes that
begin with the client's salt, so it is readable by its owner alone.
"""

import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pdcluster_worker.engine.tier_ports import TierFacts
from pdcluster_worker.errors import ModelError

logger = logging.getLogger(__name__)

FORMAT = 1
MOST_FILES = 64
"""Engines that share a folder: each takes a file that no other one has locked."""

UNUSED_SECONDS = 86400.0
"""A file that no engine has, and none has written to for so long, is removed."""

KEPT_SECONDS = 7 * UNUSED_SECONDS
"""The same of one that an engine that begins later may take."""

_MAGIC, _SLOT_MAGIC = b"PDC-KV\0\0", b"kvblock\0"
_HEADER = struct.Struct("<8sI32sQ")  # magic, format, fingerprint, slot size
_SLOT = struct.Struct("<8s32sQI")  # magic, key, number of the write, checksum
_PAGE = 4096


class DiskTier:
    OVERHEAD = 3 * _PAGE  # of a file's header, and of two slots that begin on a page

    def __init__(
        self, name: str, folder: Path, size: int, block_bytes: int, fingerprint: bytes
    ) -> None:
        """Raises ModelError where the folder cannot hold it."""
        self._block_bytes = block_bytes
        self._slot_bytes = -(-(_SLOT.size + block_bytes) // _PAGE) * _PAGE
        num_slots = (size - _PAGE) // self._slot_bytes
        digest = hashlib.sha256(fingerprint).digest()
        self._header_of_file = _HEADER.pack(_MAGIC, FORMAT, digest, self._slot_bytes)
        self._fd, self.path = _open_file(name, folder, self._header_of_file)
        try:
            self._begin(name, size)
            found = sorted(self._scan(num_slots))
        except OSError as e:
            os.close(self._fd)
            raise ModelError(f"{name}: cannot use {self.path}: {e.strerror}: check the disk") from e
        self._number = found[-1][0] if found else 0
        self.facts = TierFacts(name, num_slots, [(slot, key) for _, slot, key in found])
        logger.info(
            "opened kv tier name=%s file=%s slots=%d found=%d",
            *(name, self.path, num_slots, len(found)),
        )

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        start = self._start(slot)
        self._write_header()
        self._number += 1
        header = self._header(key, self._number, block)
        _write(self._fd, bytes(_SLOT.size), start)
        _write(self._fd, block, start + _SLOT.size)
        _write(self._fd, header, start)

    def read(self, slot: int, key: bytes, target: memoryview) -> bool:
        start = self._start(slot)
        try:
            header = os.pread(self._fd, _SLOT.size, start)
            num_read = os.preadv(self._fd, [target], start + _SLOT.size)
        except OSError as e:
            logger.warning("cannot read a kv block file=%s: %s", self.path, e.strerror)
            return False
        if len(header) < _SLOT.size or num_read < self._block_bytes:
            return False
        _, _, number, _ = _SLOT.unpack(header)
        return header == self._header(key, number, target)

    def close(self) -> None:
        os.close(self._fd)

    def _start(self, slot: int) -> int:
        return _PAGE + slot * self._slot_bytes

    def _header(self, key: bytes, number: int, block: memoryview) -> bytes:
        checksum = zlib.crc32(block, zlib.crc32(key + number.to_bytes(8, "little")))
        return _SLOT.pack(_SLOT_MAGIC, key, number, checksum)

    def _begin(self, name: str, size: int) -> None:
        """Empty a file of another model, layout or format.  A disk that is full takes no blocks
        for now; raises ModelError for a size that it can never have.
        """
        disk, taken = os.statvfs(self.path), os.fstat(self._fd).st_blocks * 512
        total, space = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize + taken
        if 0 < total < size:  # 0 = the file system does not know
            os.close(self._fd)
            raise ModelError(
                f"{name}: size {size} is more than the {total} bytes of the disk of {self.path}: "
                "lower size, or use another disk"
            )
        found = os.pread(self._fd, _HEADER.size, 0)
        if found != self._header_of_file:
            if found:
                logger.warning("emptied %s: its blocks are of another model or format", self.path)
            os.ftruncate(self._fd, 0)
        if size > space:
            logger.warning(
                "%s: its size is %d, and the disk of %s has room for %d: it takes no blocks while "
                "the disk is full",
                *(name, size, self.path, space),
            )
        self._has_header = found == self._header_of_file
        try:
            self._write_header()
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        if os.fstat(self._fd).st_size > size:
            os.ftruncate(self._fd, size)

    def _write_header(self) -> None:
        """At the first write to a disk that was full at the start."""
        if not self._has_header:
            _write(self._fd, self._header_of_file, 0)
            self._has_header = True

    def _scan(self, num_slots: int) -> Iterator[tuple[int, int, bytes]]:
        """(number, slot, key) of slots that seem whole; `read` makes sure."""
        end = os.fstat(self._fd).st_size
        for slot in range(min(num_slots, -(-(end - _PAGE) // self._slot_bytes))):
            header = os.pread(self._fd, _SLOT.size, self._start(slot))
            if len(header) == _SLOT.size and header.startswith(_SLOT_MAGIC):
                _, key, number, _ = _SLOT.unpack(header)
                yield number, slot, key


def _open_file(name: str, folder: Path, header: bytes) -> tuple[int, Path]:
    """One with that header, else the first that is not locked."""
    paths = [folder / f"kv-blocks-{number}" for number in range(MOST_FILES)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (*filter(lambda path: _begins_with(path, header), paths), *paths):
            if (descriptor := _lock(path, os.O_CREAT)) is not None:
                for each in paths:
                    if each != path:
                        is_kept = _begins_with(each, header)
                        _remove_unused(each, KEPT_SECONDS if is_kept else UNUSED_SECONDS)
                return descriptor, path
    except OSError as e:
        raise ModelError(
            f"{name}: cannot use folder {folder}: {e.strerror}: give a path that the worker may "
            "write to, such as that of a mounted volume"
        ) from e
    raise ModelError(
        f"{name}: {MOST_FILES} engines have files in {folder}: give other workers another path"
    )


def _begins_with(path: Path, header: bytes) -> bool:
    """Without a lock, which would keep the file's engine from it."""
    try:
        with path.open("rb") as file:
            return file.read(len(header)) == header
    except OSError:
        return False


def _lock(path: Path, flags: int = 0) -> int | None:
    """Descriptor of the file; None = another process has it, or has just removed it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _remove_unused(path: Path, seconds: float) -> None:
    before = time.time() - seconds
    with suppress(OSError):
        if not path.is_file() or path.stat().st_mtime > before:
            return
        if (descriptor := _lock(path)) is None:
            return
        if os.fstat(descriptor).st_mtime <= before:
            path.unlink()
            logger.info("removed %s: no engine has written to it for %.0f s", path, seconds)
        os.close(descriptor)


def _write(descriptor: int, data: bytes | memoryview, start: int) -> None:
    """All of it.  Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
