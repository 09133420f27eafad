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
from pdcluster_worker.fetch.folder import Wanted, check_space
from pdcluster_worker.fetch.hub import Hub, Listing
from pdcluster_worker.fetch.progress import Progress

logger = logging.getLogger(__name__)

PARALLEL_FILES = 4
FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 60.0


def fetch(wanted: Wanted, attempts: int) -> None:
    """Make the folder.

    Raises FetchError, OSError, or HubError after so many failures in a row without a new byte.
    """
    with wanted.only_run():
        if not wanted.is_there():
            _fetch_again_and_again(wanted, attempts)


def _fetch_again_and_again(wanted: Wanted, attempts: int) -> None:
    num_failures, num_bytes = 0, -1
    backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
    while True:
        try:
            _fetch_once(wanted)
            return
        except HubError as e:
            before, num_bytes = num_bytes, _bytes_in(wanted.work)
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


def _fetch_once(wanted: Wanted) -> None:
    hub = Hub(wanted.repo, wanted.revision)
    listing = hub.listing()
    folder = wanted.open_work(listing.commit)
    logger.info(
        "fetching repo=%s revision=%s commit=%s folder=%s",
        wanted.repo,
        wanted.revision,
        listing.commit,
        wanted.target,
    )
    small = small_files(listing.files)
    _download(hub, listing, folder, small)
    weights = _weights_of(listing, folder) if wanted.weights else []
    _download(hub, listing, folder, weights)
    wanted.publish({file.name for file in (*small, *weights)})
    logger.info(
        "fetched repo=%s commit=%s files=%d folder=%s",
        wanted.repo,
        listing.commit,
        len(small) + len(weights),
        wanted.target,
    )


def _weights_of(listing: Listing, folder: Path) -> list[RemoteFile]:
    index = folder / INDEX
    return weights_files(listing.files, index.read_bytes() if index.exists() else None)


def _download(hub: Hub, listing: Listing, folder: Path, files: Sequence[RemoteFile]) -> None:
    """All of them, some side by side; the first failure ends the others."""
    here = sum(bytes_of(folder, file) for file in files)
    total = sum(file.size or 0 for file in files)
    check_space(folder, total - here)
    with (
        Progress(folder.name.strip("."), total) as progress,
        ThreadPoolExecutor(PARALLEL_FILES) as threads,
    ):
        progress.add(here)
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
