"""Log the progress of a download, a line every few seconds."""

import logging
import threading
import time

logger = logging.getLogger(__name__)

EVERY_SECONDS = 5.0


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
        """So many more are here; negative: so many had to be thrown away."""
        with self._lock:
            self.done += num_bytes

    def _report(self) -> None:
        before, at = self.done, time.monotonic()
        while not self._stop.wait(EVERY_SECONDS):
            done, now = self.done, time.monotonic()
            rate = (done - before) / (now - at)
            share = 100 * done / self._total if self._total else 0.0
            logger.info(
                "fetching %s percent=%.1f bytes=%d of=%d bytes_per_second=%.0f",
                self._title,
                share,
                done,
                self._total,
                rate,
            )
            before, at = done, now
