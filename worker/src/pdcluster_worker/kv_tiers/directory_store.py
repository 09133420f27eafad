"""A store in a directory of a volume that workers mount: they write and delete at once.

    PATH/kv-shared-1/<2 hex digits of the key>/<key>-<model>-<bytes>       an entry
                                               <random>.new-<bytes>        one that is being written

An entry is written under a name of its own and then renamed, so that it is found whole.  There are
256 folders, and each holds a 256th of the size at most: a writer makes its file, whose name says
how large it will be, then adds up the names in the folder, and deletes the least recently used
entries until there is room.  The last writer that adds up sees all others, so the limit holds
without locks, whatever workers there are and whenever they are killed.  A volume that is full
before then costs the folder its least recently used entries too.
"""

import errno
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_tiers.shared import ENTRY_BYTES

logger = logging.getLogger(__name__)

NUM_FOLDERS = 256
FOLDER = "kv-shared-1"
IDENTITY = "identity"
"""A folder of one folder, whose name all workers of the directory know it by."""

LEAST_ENTRIES = 2
"""That a folder has room for."""

LEFT_SECONDS = 60.0
"""A file that was not finished for so long is of a worker that was killed."""

USED_SECONDS = 60.0
"""A use is not noted again so soon: it costs a write."""

SLACK = 16
"""A folder that is full gives up one part in so many at least, so that not each write looks for the
oldest."""

MOST_LISTS = 8
"""Looks at a folder that others change meanwhile."""

HAS_SECONDS = 0.2
"""Time of one call: of a longer prefix, the rest counts as absent."""

_BLOCK = 4096  # of a file system
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)


class DirectoryStore:
    def __init__(
        self, name: str, path: Path, size: int, block_bytes: int, fingerprint: bytes
    ) -> None:
        """A volume that does not answer is set up once it does; raises ModelError for a path or a
        size that can never be used.
        """
        self._entry_bytes = -(-(ENTRY_BYTES + block_bytes) // _BLOCK) * _BLOCK
        self._most = size // NUM_FOLDERS
        self._slack = self._most // SLACK // self._entry_bytes * self._entry_bytes
        self._root = path / FOLDER
        self._suffix = f"-{fingerprint[:8].hex()}-{self._entry_bytes}"
        least = NUM_FOLDERS * LEAST_ENTRIES * self._entry_bytes
        if size < least:
            raise ModelError(
                f"{name}: size {size} is less than the {least} bytes that {NUM_FOLDERS} folders of "
                f"{LEAST_ENTRIES} KV blocks take: raise it, or leave the tier out"
            )
        self.identity = uuid.uuid4().hex + self._suffix
        self._device: int | None = None  # of the volume; None = it has not answered yet
        try:
            self._check_size(name, path, size)
            self.identity = self._open()
        except OSError as e:
            if e.errno in _UNUSABLE:
                raise ModelError(
                    f"{name}: cannot use {path}: {e.strerror}: give the path of a mounted volume "
                    "that the worker may write to"
                ) from e
            logger.error("%s: %s does not answer, and is tried again: %s", name, path, e)

    def has(self, keys: Sequence[bytes]) -> int:
        self._check_open()
        until = time.monotonic() + HAS_SECONDS
        for number, key in enumerate(keys):
            if time.monotonic() > until:
                return number
            try:
                self._path(key).stat()
            except FileNotFoundError:
                self._check_there()
                return number
        return len(keys)

    def get(self, key: bytes, parts: Sequence[memoryview]) -> int:
        self._check_open()
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._check_there()
            raise KeyError(key) from None
        try:
            num_read = os.preadv(descriptor, parts, 0)
            if time.time() - os.fstat(descriptor).st_mtime > USED_SECONDS:
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return num_read

    def put(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        self._check_open()
        path = self._path(key)
        with suppress(FileNotFoundError):
            os.utime(path)
            return
        try:
            self._put(path, parts)
        except OSError as e:
            if isinstance(e, FileNotFoundError):
                self._open_again(e)
            elif e.errno not in _FULL or not self._drop_for_one_more(path.parent):
                raise
            self._put(path, parts)

    def delete(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """No file is open between two calls."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / (name + self._suffix)

    def _check_size(self, name: str, path: Path, size: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        volume = os.statvfs(path)
        total = volume.f_blocks * volume.f_frsize  # 0 = the file system does not know
        if 0 < total < size:
            raise ModelError(
                f"{name}: size {size} is more than the {total} bytes of the volume of {path}: "
                "lower size, or give it a larger volume"
            )

    def _check_open(self) -> None:
        if self._device is None:
            self._open()

    def _open(self) -> str:
        """Make what is missing, and return the identity.  Raises OSError."""
        for number in range(NUM_FOLDERS):
            (self._root / f"{number:02x}").mkdir(mode=0o700, parents=True, exist_ok=True)
        identity = self._find_identity()
        self._check_writable()
        self._device = self._root.parent.stat().st_dev
        return identity

    def _open_again(self, error: FileNotFoundError) -> None:
        """An emptied folder is; raises the error for a volume that was unmounted, whose path looks
        empty too, but on another device.
        """
        if self._root.parent.stat().st_dev != self._device:
            raise error
        self._open()
        logger.warning("set up %s again, which was emptied", self._root)

    def _check_writable(self) -> None:
        """A full volume is: its entries make room."""
        probe = self._root / f"{uuid.uuid4().hex}.new-0"
        try:
            probe.touch(mode=0o600)
        except OSError as e:
            if e.errno not in _FULL:
                raise
        probe.unlink(missing_ok=True)

    def _find_identity(self) -> str:
        """That of the first worker: a folder that is not empty is never replaced by another."""
        chosen, number = self._root / IDENTITY, self.identity.removesuffix(self._suffix)
        with suppress(FileNotFoundError, StopIteration):
            return next(chosen.iterdir()).name + self._suffix
        own = self._root / f"{uuid.uuid4().hex}.new-0"
        try:
            (own / number).mkdir(mode=0o700, parents=True)
            own.rename(chosen)
        except OSError as e:
            for made in (own / number, own):
                with suppress(OSError):
                    made.rmdir()
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return next(chosen.iterdir()).name + self._suffix

    def _check_there(self) -> None:
        """It may have been emptied or unmounted.  Raises OSError."""
        try:
            (self._root / IDENTITY).stat()
        except FileNotFoundError as e:
            self._open_again(e)

    def _put(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        new = path.parent / f"{uuid.uuid4().hex}.new-{self._entry_bytes}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                self._evict(path.parent, new.name)
                _write(descriptor, parts)
            finally:
                os.close(descriptor)
            new.rename(path)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise

    def _evict(self, folder: Path, own: str) -> None:
        """Raises OSError where files that are being written take all of it."""
        for _ in range(MOST_LISTS):
            names = [each.name for each in folder.iterdir()]
            excess = sum(map(_bytes_of, names)) - self._most
            if excess <= 0:
                return
            if self._drop_oldest(folder, names, excess + self._slack, own) >= excess + self._slack:
                return
        raise OSError(errno.ENOSPC, f"no room in {folder}: size is too small for its writers")

    def _drop_for_one_more(self, folder: Path) -> int:
        """Delete some on a full volume; returns the bytes that are gone."""
        names = [each.name for each in folder.iterdir()]
        return self._drop_oldest(folder, names, max(self._slack, self._entry_bytes))

    def _drop_oldest(
        self, folder: Path, names: Sequence[str], num_bytes: int, own: str = ""
    ) -> int:
        """So many bytes at least, where there are; returns those that are gone."""
        num_dropped = 0
        for name, size in self._oldest(folder, names, own):
            (folder / name).unlink(missing_ok=True)
            num_dropped += size
            if num_dropped >= num_bytes:
                break
        return num_dropped

    def _oldest(self, folder: Path, names: Sequence[str], own: str) -> Iterator[tuple[str, int]]:
        """Files that may go, and their bytes."""
        used: list[tuple[float, str]] = []
        for name in names:
            with suppress(FileNotFoundError):
                used.append(((folder / name).stat().st_mtime, name))
        now = time.time()
        for changed, name in sorted(used):
            if ".new-" not in name or (now - changed > LEFT_SECONDS and name != own):
                yield name, _bytes_of(name)


def _bytes_of(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _write(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """All of them.  Raises OSError."""
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]
