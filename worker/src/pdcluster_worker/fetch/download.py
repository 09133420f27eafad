"""Download of a model into its folder: files in parallel, gone on with after a kill, retried while
the hub fails.

Our own, since snapshot_download of huggingface_hub 2.4 begins a file again after a kill, and
compares no hash.  Bytes go to NAME.part; only a whole file of the announced size and hash gets its
name.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from pdcluster_worker.backoff import Backoff
from pdcluster_worker.errors import HubError
from pdcluster_worker.fetch.hf_hub import (
    INDEX,
    Hub,
    RemoteFile,
    RepoListing,
    small_files,
    weights_files,
)
from pdcluster_worker.fetch.model_folder import ModelDownload, check_space

logger = logging.getLogger(__name__)

PARALLEL_FILES = 4
FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 60.0
LOG_SECONDS = 5.0
_READ_BYTES = 1 << 20


def fetch(download: ModelDownload, attempts: int) -> None:
    """Make the folder.

    Raises FetchError, OSError, or HubError after so many failures in a row without a new byte.
    """
    with download.only_run():
        if not download.is_there():
            _fetch_with_retries(download, attempts)


def _fetch_with_retries(download: ModelDownload, attempts: int) -> None:
    num_failures, num_bytes = 0, -1
    backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
    while True:
        try:
            _fetch_once(download)
            return
        except HubError as e:
            before, num_bytes = num_bytes, _bytes_in(download.work)
            if num_bytes > before:
                num_failures = 0
                backoff.reset()
            num_failures += 1
            if num_failures >= attempts:
                raise
            delay = backoff.next_seconds()
            logger.warning(
                "download failed, trying again seconds=%.0f attempt=%d of=%d reason=%s",
                *(delay, num_failures, attempts, e),
            )
            time.sleep(delay)


def _fetch_once(download: ModelDownload) -> None:
    hub = Hub(download.repo, download.revision)
    listing = hub.listing()
    folder = download.open_work(listing.commit)
    logger.info(
        "fetching repo=%s revision=%s commit=%s folder=%s",
        *(download.repo, download.revision, listing.commit, download.target),
    )
    small = small_files(listing.files)
    _fetch_files(hub, listing, folder, small)
    weights: list[RemoteFile] = []
    if download.weights:
        index = folder / INDEX
        weights = weights_files(listing.files, index.read_bytes() if index.exists() else None)
    _fetch_files(hub, listing, folder, weights)
    download.publish({file.name for file in (*small, *weights)})
    logger.info(
        "fetched repo=%s commit=%s files=%d folder=%s",
        *(download.repo, listing.commit, len(small) + len(weights), download.target),
    )


def _fetch_files(hub: Hub, listing: RepoListing, folder: Path, files: Sequence[RemoteFile]) -> None:
    """Fetch several in parallel; the first failure ends the others."""
    num_present = sum(_bytes_of(folder, file) for file in files)
    total = sum(file.size or 0 for file in files)
    check_space(folder, total - num_present)
    with (
        DownloadProgress(folder.name.strip("."), total) as progress,
        ThreadPoolExecutor(PARALLEL_FILES) as threads,
    ):
        progress.add(num_present)
        fetcher = _FileFetcher(hub, listing.commit, folder, progress)
        futures = [threads.submit(fetcher.fetch, file) for file in files]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            fetcher.stop.set()
            for future in futures:
                future.cancel()
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in sorted((error for error in errors if error is not None), key=_rank):
        raise error


class _StoppedError(Exception):
    """Another file's download has failed."""


def _rank(error: BaseException) -> int:
    """Errors that need a user come first, those that only followed another last."""
    return 2 if isinstance(error, _StoppedError) else 1 if isinstance(error, HubError) else 0


class _FileFetcher:
    """One commit into one folder; `stop` ends every file that is under way."""

    def __init__(self, hub: Hub, commit: str, folder: Path, progress: "DownloadProgress") -> None:
        self._hub = hub
        self._commit = commit
        self._folder = folder
        self._progress = progress
        self.stop = threading.Event()

    def fetch(self, file: RemoteFile) -> None:
        """Fetch what is missing.  Raises FetchError, HubError, _StoppedError, OSError."""
        whole, part = self._folder / file.name, self._folder / f"{file.name}.part"
        if whole.exists():
            return
        with part.open("a+b") as out:
            digest = hashlib.sha256()
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
                    raise _StoppedError
                out.write(chunk)
                digest.update(chunk)
                self._progress.add(len(chunk))
        return digest

    def _check(self, file: RemoteFile, part: Path, size: int, digest: str) -> None:
        """Leave a short file for the next attempt; delete a false one."""
        if file.size is not None and size < file.size:
            raise HubError(f"{file.name} broke off at {size} of {file.size} bytes")
        if (file.size is not None and size > file.size) or file.sha256 not in (None, digest):
            part.unlink()
            self._progress.add(-size)
            raise HubError(
                f"{file.name} did not come as the hub announced it ({size} bytes, sha256 "
                f"{digest[:12]}): thrown away"
            )


class DownloadProgress:
    """Counts bytes from any thread; within its `with` block it logs them."""

    def __init__(self, title: str, total: int) -> None:
        self.done = 0
        self._title = title
        self._total = total
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> "DownloadProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def add(self, num_bytes: int) -> None:
        """num_bytes: negative for bytes that were thrown away."""
        with self._lock:
            self.done += num_bytes

    def _report(self) -> None:
        before, at = self.done, time.monotonic()
        while not self._stop.wait(LOG_SECONDS):
            done, now = self.done, time.monotonic()
            logger.info(
                "fetching %s percent=%.1f bytes=%d of=%d bytes_per_second=%.0f",
                *(self._title, 100 * done / self._total if self._total else 0.0),
                *(done, self._total, (done - before) / (now - at)),
            )
            before, at = done, now


def _bytes_of(folder: Path, file: RemoteFile) -> int:
    for path in (folder / file.name, folder / f"{file.name}.part"):
        if path.exists():
            return path.stat().st_size
    return 0


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0


def _hash(part: Any, digest: Any) -> int:
    """Hash what an earlier run has left; returns its size."""
    part.seek(0)
    while chunk := part.read(_READ_BYTES):
        digest.update(chunk)
    size: int = part.tell()
    return size
