"""Downloads one file so that a kill at any moment loses nothing and leaves nothing false.

Bytes go to NAME.part, which a later run goes on with; only a whole file that
has the size and hash which the hub announced gets its name.
"""

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

from pdcluster_worker.errors import HubError
from pdcluster_worker.fetch.files import RemoteFile
from pdcluster_worker.fetch.hf_hub import Hub
from pdcluster_worker.fetch.progress import DownloadProgress

_READ_BYTES = 1 << 20


class StoppedError(Exception):
    """Another file's download has failed."""


class Download:
    """One commit into one folder; `stop` ends every file that is under way."""

    def __init__(self, hub: Hub, commit: str, folder: Path, progress: DownloadProgress) -> None:
        self._hub = hub
        self._commit = commit
        self._folder = folder
        self._progress = progress
        self.stop = threading.Event()

    def file(self, file: RemoteFile) -> None:
        """Fetch it, or what is missing of it.

        Raises FetchError, HubError, StoppedError, OSError.
        """
        whole, part = self._folder / file.name, self._folder / f"{file.name}.part"
        if whole.exists():
            return
        digest = hashlib.sha256()
        with part.open("a+b") as out:
            start = _hash(out, digest)
            if file.size is None or start < file.size:
                digest = self._append(file, out, start, digest)
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        self._check(file, part, size, digest.hexdigest())
        part.rename(whole)

    def _append(self, file: RemoteFile, out: Any, start: int, digest: Any) -> Any:
        with self._hub.read(self._commit, file.name, start) as (first, chunks):
            if first < start:  # the hub sends the whole file again
                out.truncate(0)
                self._progress.add(-start)
                digest = hashlib.sha256()
            for chunk in chunks:
                if self.stop.is_set():
                    raise StoppedError
                out.write(chunk)
                digest.update(chunk)
                self._progress.add(len(chunk))
        return digest

    def _check(self, file: RemoteFile, part: Path, size: int, digest: str) -> None:
        """A short file is gone on with; a false one is thrown away."""
        if file.size is not None and size < file.size:
            raise HubError(f"{file.name} broke off at {size} of {file.size} bytes")
        if (file.size is not None and size > file.size) or file.sha256 not in (None, digest):
            part.unlink()
            self._progress.add(-size)
            raise HubError(
                f"{file.name} did not come as the hub announced it ({size} bytes, sha256 "
                f"{digest[:12]}): thrown away"
            )


def bytes_of(folder: Path, file: RemoteFile) -> int:
    """Bytes of a file that are here already."""
    for path in (folder / file.name, folder / f"{file.name}.part"):
        if path.exists():
            return path.stat().st_size
    return 0


def _hash(part: Any, digest: Any) -> int:
    """Hash what an earlier run has left; returns its size."""
    part.seek(0)
    while chunk := part.read(_READ_BYTES):
        digest.update(chunk)
    size: int = part.tell()
    return size
