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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # documented there

from pdcluster_schema.backoff import Backoff
from pdcluster_worker.errors import HubError
from pdcluster_worker.fetch.hf_hub import (
    INDEX,
    Hub,
    RemoteFile,
    RepoListing,
    adapter_files,
    gguf_file,
    small_files,
    weights_files,
)
from pdcluster_worker.fetch.model_folder import (
    LOG_SECONDS,
    ModelDownload,
    check_space,
    only_run,
)

logger = logging.getLogger(__name__)

PARALLEL_FILES = 4
RETRY = Backoff(first=1.0, most=60.0)
BAR_SECONDS = 0.2
_READ_BYTES = 1 << 20

Progress = Callable[[Path, Sequence[RemoteFile], int], AbstractContextManager[None]]
"""Shows how much of these files is in a folder, of so many bytes."""


def fetch(download: ModelDownload, attempts: int, *, bar: bool = False) -> None:
    """Make the folder; with a bar, or with lines in the log.  Raises FetchError, OSError, or
    HubError after so many failures in a row.
    """
    with only_run(download.target):
        if not download.is_there():
            _fetch_with_retries(download, attempts, progress_bar if bar else logged_progress)


def _fetch_with_retries(download: ModelDownload, attempts: int, progress: Progress) -> None:
    num_failures, num_bytes = 0, -1
    while True:
        try:
            _fetch_once(download, progress)
            return
        except HubError as e:
            before, num_bytes = num_bytes, sum(map(_size, download.work.glob("*")))
            if num_bytes > before:
                num_failures = 0
            num_failures += 1
            if num_failures >= attempts:
                raise
            delay = RETRY.after(num_failures)
            logger.warning(
                "download failed, trying again seconds=%.0f attempt=%d of=%d reason=%s",
                *(delay, num_failures, attempts, e),
            )
            time.sleep(delay)


def _fetch_once(download: ModelDownload, progress: Progress) -> None:
    hub = Hub(download.repo, download.revision)
    listing = hub.listing()
    folder = download.open_work(listing.commit)
    logger.info(
        "fetching repo=%s revision=%s commit=%s folder=%s",
        *(download.repo, download.revision, listing.commit, download.target),
    )
    gguf = gguf_file(listing.files, download.gguf)
    choose = adapter_files if download.is_adapter else small_files
    small = choose(listing.files) if gguf is None else [gguf]
    _fetch_files(hub, listing, folder, small, progress)
    weights: list[RemoteFile] = []
    if download.weights and not download.is_adapter and gguf is None:
        index = folder / INDEX
        weights = weights_files(listing.files, index.read_bytes() if index.exists() else None)
    _fetch_files(hub, listing, folder, weights, progress)
    download.publish({file.name for file in (*small, *weights)})
    logger.info(
        "fetched repo=%s commit=%s files=%d folder=%s",
        *(download.repo, listing.commit, len(small) + len(weights), download.target),
    )


def _fetch_files(
    hub: Hub, listing: RepoListing, folder: Path, files: Sequence[RemoteFile], progress: Progress
) -> None:
    """Fetch several in parallel; the first failure ends the others."""
    if not files:
        return
    total = sum(file.size or 0 for file in files)
    check_space(folder, total - _num_present(folder, files))
    stop = threading.Event()
    with (
        progress(folder, files, total),
        ThreadPoolExecutor(PARALLEL_FILES) as threads,
    ):
        futures = [
            threads.submit(_fetch_file, hub, listing.commit, folder, file, stop) for file in files
        ]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
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


def _fetch_file(
    hub: Hub, commit: str, folder: Path, file: RemoteFile, stop: threading.Event
) -> None:
    """Fetch what is missing of a file.  Raises FetchError, HubError, _StoppedError, OSError."""
    whole, part = folder / file.name, folder / f"{file.name}.part"
    if whole.exists():
        return
    with part.open("a+b") as out:
        out.seek(0)
        digest = hashlib.sha256()
        while chunk := out.read(_READ_BYTES):  # what an earlier run has left
            digest.update(chunk)
        start = out.tell()
        if file.size is None or start < file.size:
            with hub.read(commit, file.name, start) as (first, chunks):
                if first < start:  # the hub sends the whole file again
                    out.truncate(0)
                    digest = hashlib.sha256()
                for chunk in chunks:
                    if stop.is_set():
                        raise _StoppedError
                    out.write(chunk)
                    digest.update(chunk)
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    _check(file, part, size, digest.hexdigest())
    part.rename(whole)


def _check(file: RemoteFile, part: Path, size: int, digest: str) -> None:
    """Leave a short file for the next attempt; delete a false one."""
    if file.size is not None and size < file.size:
        raise HubError(f"{file.name} broke off at {size} of {file.size} bytes")
    if (file.size is not None and size > file.size) or file.sha256 not in (None, digest):
        part.unlink()
        raise HubError(
            f"{file.name} did not come as the hub announced it ({size} bytes, sha256 "
            f"{digest[:12]}): thrown away"
        )


@contextmanager
def logged_progress(folder: Path, files: Sequence[RemoteFile], total: int) -> Iterator[None]:
    before, at = _num_present(folder, files), time.monotonic()

    def report() -> None:
        nonlocal before, at
        done, now = _num_present(folder, files), time.monotonic()
        logger.info(
            "fetching %s percent=%.1f bytes=%d of=%d bytes_per_second=%.0f",
            *(folder.name.strip("."), 100 * done / total if total else 0.0),
            *(done, total, (done - before) / (now - at)),
        )
        before, at = done, now

    with _repeated(report, LOG_SECONDS):
        yield


@contextmanager
def progress_bar(folder: Path, files: Sequence[RemoteFile], total: int) -> Iterator[None]:
    """The hub client's own, on stderr."""
    begun = _num_present(folder, files)
    options = {"total": total, "initial": begun, "unit": "B", "unit_scale": True}
    with tqdm(desc=files[-1].name, **options) as bar:  # type: ignore[no-untyped-call]  # it has no types

        def report() -> None:
            bar.update(_num_present(folder, files) - bar.n)

        try:
            with _repeated(report, BAR_SECONDS):
                yield
        finally:
            report()


@contextmanager
def _repeated(report: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call it every so often, in a thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            report()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _num_present(folder: Path, files: Sequence[RemoteFile]) -> int:
    """Bytes of these files, whole or in part."""
    return sum(_size(folder / name) for file in files for name in (file.name, f"{file.name}.part"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
