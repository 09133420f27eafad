"""A whole model: what is needed, the files side by side, again and again while the hub fails, then
the folder in its place.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from pdcluster_worker.backoff import Backoff
from pdcluster_worker.errors import HubError
from pdcluster_worker.fetch.download import Download, StoppedError, bytes_of
from pdcluster_worker.fetch.files import INDEX, RemoteFile, small_files, weights_files
from pdcluster_worker.fetch.hf_hub import Hub, RepoListing
from pdcluster_worker.fetch.model_folder import ModelDownload, check_space
from pdcluster_worker.fetch.progress import DownloadProgress

logger = logging.getLogger(__name__)

PARALLEL_FILES = 4
FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 60.0


def fetch(download: ModelDownload, attempts: int) -> None:
    """Make the folder.

    Raises FetchError, OSError, or HubError after so many failures in a row without a new byte.
    """
    with download.only_run():
        if not download.is_there():
            _fetch_again_and_again(download, attempts)


def _fetch_again_and_again(download: ModelDownload, attempts: int) -> None:
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
                delay,
                num_failures,
                attempts,
                e,
            )
            time.sleep(delay)


def _fetch_once(download: ModelDownload) -> None:
    hub = Hub(download.repo, download.revision)
    listing = hub.listing()
    folder = download.open_work(listing.commit)
    logger.info(
        "fetching repo=%s revision=%s commit=%s folder=%s",
        download.repo,
        download.revision,
        listing.commit,
        download.target,
    )
    small = small_files(listing.files)
    _download(hub, listing, folder, small)
    weights = _weights_of(listing, folder) if download.weights else []
    _download(hub, listing, folder, weights)
    download.publish({file.name for file in (*small, *weights)})
    logger.info(
        "fetched repo=%s commit=%s files=%d folder=%s",
        download.repo,
        listing.commit,
        len(small) + len(weights),
        download.target,
    )


def _weights_of(listing: RepoListing, folder: Path) -> list[RemoteFile]:
    index = folder / INDEX
    return weights_files(listing.files, index.read_bytes() if index.exists() else None)


def _download(hub: Hub, listing: RepoListing, folder: Path, files: Sequence[RemoteFile]) -> None:
    """All of them, some side by side; the first failure ends the others."""
    num_present = sum(bytes_of(folder, file) for file in files)
    total = sum(file.size or 0 for file in files)
    check_space(folder, total - num_present)
    with (
        DownloadProgress(folder.name.strip("."), total) as progress,
        ThreadPoolExecutor(PARALLEL_FILES) as threads,
    ):
        progress.add(num_present)
        download = Download(hub, listing.commit, folder, progress)
        futures = [threads.submit(download.file, file) for file in files]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            download.stop.set()
            for future in futures:
                future.cancel()
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in sorted((error for error in errors if error is not None), key=_rank):
        raise error


def _rank(error: BaseException) -> int:
    """Rank of an error: first those that need a user, then those that may pass, last those that
    only followed.
    """
    return 2 if isinstance(error, StoppedError) else 1 if isinstance(error, HubError) else 0


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0
